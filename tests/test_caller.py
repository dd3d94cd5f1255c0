"""Calls of a model: what may go in and come out, what a call costs, and which errors come before anything is sent."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchdl_ray import DataParallel, replicate
from torchdl_ray.caller import Shards
from torchdl_ray.errors import ArgumentError, BackwardError, GatherError, ScatterError, StructureChanged

WORKERS = [0, 2, 4]


def local(module: nn.Module, workers: int, **options: Any) -> DataParallel:
    return DataParallel(module, workers, backend="local", timeout_s=30, **options)


class Apply(nn.Module):
    """Runs a function of (module, arguments), so that each test says what its model does."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(3, 2).double()

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)

    def encode(self, x):
        return torch.tanh(self.linear(x))

    def not_a_call(self):
        return None


def rows(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain(value: Any) -> Any:
    return value.fetch() if hasattr(value, "fetch") else value


def both(function: Any, workers: int, **options: Any) -> tuple[Apply, DataParallel]:
    torch.manual_seed(0)
    twin = Apply(function)
    return twin, local(copy.deepcopy(twin), workers, **options)


def assert_trained_alike(twin: nn.Module, model: DataParallel, tolerance: float = 1e-12) -> None:
    for (name, theirs), (_, ours) in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        assert (theirs.grad is None) == (ours.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(torch.from_numpy(ours.grad.numpy()), theirs.grad, rtol=0, atol=tolerance)


# ---- S1, S6: sizes


@pytest.mark.parametrize("workers", [1, 4, 7])
@pytest.mark.parametrize("num", [1, 3, 4, 5, 36])
def test_shards_are_balanced(num, workers):
    def count(module, x):
        return module.linear(x), torch.full((1,), len(x))

    _, model = both(count, workers)
    with model:
        x = rows(num)
        out, counts = model(x)
        size, longer = divmod(num, workers)
        expected = [size + (r < longer) for r in range(workers)]
        assert [int(c) for c in counts.shards] == [e for e in expected if e]
        assert torch.allclose(out.fetch(), model.module.linear(x))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((torch.zeros(0, 3),), {}, ["empty", "args[0]"]),
        ((torch.zeros(4, 3), torch.zeros(5)), {}, ["args[1]", "5 rows", "4"]),
        ((torch.zeros(4, 3),), {"mask": torch.zeros(3)}, ["kwargs['mask']", "3 rows"]),
        (({"a": torch.zeros(4), "b": [torch.zeros(2)]},), {}, ["args[0]['b'][0]", "2 rows"]),
        ((), {}, ["nothing to cut"]),
        ((torch.zeros(()),), {}, ["nothing to cut"]),
        ((replicate(torch.zeros(4)),), {}, ["nothing to cut"]),
        ((1, "x", None), {}, ["nothing to cut"]),
        ((torch.zeros(4, 3).to_sparse(),), {}, ["sparse"]),
        ((torch.zeros(4, 3, device="meta"),), {}, ["meta"]),
    ],
)
def test_bad_arguments_raise_before_anything_is_sent(workers, args, kwargs, words):
    twin, model = both(lambda m, *a, **k: m.linear(a[0].double()), workers)
    with model:
        model(rows(4)).fetch()
        before, recorded = model._stream.num_messages, len(model._stream._recorded)
        with pytest.raises(ArgumentError) as caught:
            model(*args, **kwargs)
        for word in words:
            assert word in str(caught.value)
        assert isinstance(caught.value, ScatterError | ArgumentError)
        assert model._stream.num_messages == before
        assert len(model._stream._recorded) == recorded
        assert torch.allclose(model(rows(4)).fetch(), twin(rows(4)))


@pytest.mark.parametrize(("num", "workers"), [(9, 2), (97, 2), (97, 4), (99, 2), (99, 4)])
def test_evaluation_has_each_row_once_in_order(num, workers):
    _, model = both(lambda m, x: x * 1, workers)
    with model, torch.no_grad():
        model.eval()
        x = torch.arange(num, dtype=torch.float64)
        found = torch.cat([model(part).fetch() for part in x.split(40)])
        assert torch.equal(found, x)


# ---- S2, S7: cost


@pytest.mark.parametrize("workers", WORKERS)
def test_scalar_output_stays_scalar(workers, recwarn):
    twin, model = both(lambda m, x: m.linear(x).square().mean(), workers)
    with model:
        loss = model(rows(7))
        assert loss.ndim == 0
        assert loss.shape == ()
        assert float(loss) == pytest.approx(twin(rows(7)).item(), rel=1e-12)
        loss.backward()
        twin(rows(7)).backward()
        assert_trained_alike(twin, model)
    assert not [w for w in recwarn if "gather" in str(w.message).lower() or "scalar" in str(w.message).lower()]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_training_step_is_one_message_and_under_one_kilobyte(workers):
    def segment(module, x, y):
        logits = module.linear(x)
        return {"logits": logits, "masks": logits.unsqueeze(1).expand(-1, 64, -1), "loss": F.mse_loss(logits, y)}

    _, model = both(segment, workers)
    sizes: list[int] = []
    with model:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x, y = rows(2000), rows(2000)[:, :2]

        def step():
            optimizer.zero_grad()
            model(x, y)["loss"].backward()
            optimizer.step()

        for _ in range(4):
            step()
        model._stream.finish()
        model._stream.reply_bytes = lambda reply: sizes.append(len(pickle.dumps(reply)))
        before = model._stream.num_messages
        for _ in range(5):
            step()
            model._stream.finish()
        assert model._stream.num_messages - before == 5 * max(workers, 1)
        model._stream.reply_bytes = None
    assert len(sizes) >= 5 * max(workers, 1)
    assert max(sizes) < 1000


@pytest.mark.parametrize("workers", WORKERS)
def test_a_trusted_call_costs_no_message(workers):
    _, model = both(lambda m, x: (m.linear(x), None), workers)
    with model:
        for _ in range(3):
            model(rows(5))
        model._stream.finish()
        before = model._stream.num_messages
        outputs = [model(rows(n)) for n in (5, 6, 7, 8)]
        assert model._stream.num_messages == before
        assert [len(o[0]) for o in outputs] == [5, 6, 7, 8]


# ---- S3: containers

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Batch:
    x: Any
    extra: Any = None
    names: list[str] = field(default_factory=list)


class Output(OrderedDict):
    """As transformers' ModelOutput: items that are attributes too, fields that are None."""

    def __init__(self, **fields):
        super().__init__({k: v for k, v in fields.items() if v is not None})
        for name, value in fields.items():
            object.__setattr__(self, name, value)


CONTAINERS = {
    "dict": lambda x: {"x": x, "n": None},
    "OrderedDict": lambda x: OrderedDict(b=x, a=x * 2),
    "dataclass": lambda x: Batch(x, extra={"y": x + 1}, names=["a", "b"]),
    "namedtuple": lambda x: Pair(x, (x * 2, "word")),
    "nested lists": lambda x: [[x, [x * 2, None]], (x * 3,)],
    "model output": lambda x: Output(loss=None, logits=x, hidden=(x, x * 2), past=None),
    "tuple": lambda x: (x,),
    "scalars": lambda x: (x, 1, 2.5, "s", True, None),
    "nothing but": lambda x: x,
}


def same(left: Any, right: Any) -> None:
    left = plain(left)
    if isinstance(right, torch.Tensor):
        torch.testing.assert_close(left, right)
        return
    assert type(left) is type(right)
    if isinstance(right, dict):
        assert list(left) == list(right)
        for key in right:
            same(left[key], right[key])
        if isinstance(right, Output):
            for key, value in vars(right).items():
                same(getattr(left, key), value)
    elif isinstance(right, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            same(a, b)
    elif isinstance(right, Batch):
        for key, value in vars(right).items():
            same(getattr(left, key), value)
    else:
        assert left == right


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_in_and_out(workers, name):
    make = CONTAINERS[name]

    def work(module, batch):
        leaf = next(x for x in flat(batch) if isinstance(x, torch.Tensor))
        assert type(batch) is type(make(leaf))
        return make(leaf * 1), batch

    _, model = both(work, workers)
    with model, torch.no_grad():
        for _ in range(5):
            x = rows(5)
            made, passed = model(make(x))
            same(made, make(x))
            same(passed, make(x))


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in flat(v)]
    if isinstance(value, list | tuple):
        return [leaf for v in value for leaf in flat(v)]
    return flat(vars(value)) if isinstance(value, Batch) else [value]


@pytest.mark.parametrize("workers", WORKERS)
def test_keyword_arguments_only(workers):
    twin, model = both(lambda m, *, x, scale=1, mode="a": m.linear(x) * (scale if mode == "a" else -scale), workers)
    with model:
        for scale, mode in [(1, "a"), (2, "b"), (3, "a"), (2, "b"), (2.5, "a"), (2.5, "b")]:
            found = model(x=rows(5), scale=scale, mode=mode)
            torch.testing.assert_close(found.fetch(), twin(x=rows(5), scale=scale, mode=mode))


@pytest.mark.parametrize("workers", WORKERS)
def test_numpy_inputs(workers):
    twin, model = both(lambda m, x, i: m.linear(torch.as_tensor(x)) + torch.as_tensor(i)[:, None], workers)
    with model:
        x, i = rows(5).numpy(), np.arange(5)
        torch.testing.assert_close(model(x, i).fetch(), twin(x, i))
        assert x.flags.writeable


@pytest.mark.parametrize("workers", WORKERS)
def test_lists_with_one_entry_per_row(workers):
    def work(module, x, lengths, names):
        assert isinstance(lengths, list)
        assert len(lengths) == len(names) == len(x)
        return x * torch.tensor(lengths)[:, None], [n + "!" for n in names], [k + 1 for k in lengths]

    _, model = both(work, workers)
    with model, torch.no_grad():
        x, lengths, names = rows(7), list(range(7)), list("abcdefg")
        for _ in range(5):
            out, words, numbers = model(x, lengths, names)
            torch.testing.assert_close(out.fetch(), x * torch.tensor(lengths)[:, None])
            assert words == [n + "!" for n in names]
            assert numbers == [k + 1 for k in lengths]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_replicated_list_and_tensor(workers):
    def work(module, x, table, names):
        assert len(table) == 7
        assert len(names) == 7
        return module.linear(x) @ table[:2, :2]

    twin, model = both(work, workers)
    with model:
        table = rows(7, seed=1).requires_grad_()
        names = list("abcdefg")
        model(rows(7), replicate(table), replicate(names)).square().sum().backward()
        found, table.grad = table.grad, None
        twin(rows(7), table, names).square().sum().backward()
        torch.testing.assert_close(found, table.grad)
        assert_trained_alike(twin, model)


@pytest.mark.parametrize("workers", WORKERS)
def test_zero_dim_tensor_goes_whole_and_gets_its_gradient(workers):
    twin, model = both(lambda m, x, scale: (m.linear(x) * scale).square().mean(), workers)
    with model:
        scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        model(rows(5), scale).backward()
        found, scale.grad = scale.grad, None
        twin(rows(5), scale).backward()
        torch.testing.assert_close(found, scale.grad)
        assert_trained_alike(twin, model)


# ---- outputs that do not join along dim 0


class Recurrent(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=batch_first).double()

    def forward(self, x):
        out, (hidden, cell) = self.lstm(x)
        return out, hidden, cell


@pytest.mark.parametrize("workers", WORKERS)
def test_recurrent_state(workers):
    torch.manual_seed(0)
    twin = Recurrent(batch_first=True)
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    with local(copy.deepcopy(twin), workers, out_dims={"1": 1, "2": 1}) as model:
        for ours, theirs in zip(model(x), twin(x), strict=True):
            torch.testing.assert_close(ours.fetch(), theirs)
        (model(x)[1].square().sum() + model(x)[0].sum()).backward()
        (twin(x)[1].square().sum() + twin(x)[0].sum()).backward()
        assert_trained_alike(twin, model, 1e-10)


@pytest.mark.parametrize("workers", WORKERS)
def test_rows_along_dim_one(workers):
    torch.manual_seed(0)
    twin = Recurrent(batch_first=False)
    x = torch.randn(6, 5, 3, dtype=torch.float64, requires_grad=True)
    with local(copy.deepcopy(twin), workers, dim=1) as model:
        out, hidden, cell = model(x)
        assert out.shape == (6, 5, 4)
        torch.testing.assert_close(hidden.fetch(), twin(x)[1])
        torch.testing.assert_close(cell.fetch(), twin(x)[2])
        out.square().sum().backward()
        found, x.grad = x.grad, None
        twin(x)[0].square().sum().backward()
        torch.testing.assert_close(found, x.grad)
        assert_trained_alike(twin, model, 1e-10)


def test_a_state_without_out_dims_is_loud():
    torch.manual_seed(0)
    twin = Recurrent(batch_first=True)
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    with local(copy.deepcopy(twin), 2) as model:
        _, hidden, _ = model(x)
        for look in (lambda: hidden + 1, lambda: hidden.shape, lambda: model(hidden)):
            with pytest.raises(GatherError, match="out_dims"):
                look()
        torch.testing.assert_close(torch.cat(hidden.shards, 1), twin(x)[1])


def test_ragged_outputs_are_read_by_shard():
    _, model = both(lambda m, x: m.linear(x)[x[:, 0] > 0], 3)
    with model:
        x = rows(8)
        out = model(x)
        with pytest.raises(GatherError, match="shards"):
            out + 1
        expected = model.module.linear(x)[x[:, 0] > 0]
        torch.testing.assert_close(torch.cat(out.shards), expected)
        torch.cat(out.shards).square().sum().backward()
        expected = Apply(None).linear
        expected.load_state_dict({k.removeprefix("linear."): v for k, v in model.state_dict().items()})
        expected(x)[x[:, 0] > 0].square().sum().backward()
        torch.testing.assert_close(torch.from_numpy(model.module.linear.weight.grad.numpy()), expected.weight.grad)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("num", [4, 7, 8])
def test_a_list_of_tensors_with_one_entry_per_row(workers, num):
    """Detections: each row has a tensor of its own size. The list is joined, and each entry is differentiable."""

    def detect(module, x):
        out = module.linear(x)
        return [out[k].repeat(int(x[k, 0].abs() * 3) + 1) for k in range(len(x))]

    twin, model = both(detect, workers)
    with model:
        x = rows(num)
        for _ in range(4):
            found, expected = model(x), twin(x)
            assert isinstance(found, list)
            assert len(found) == num
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(plain(ours), theirs)
        sum(f.square().sum() for f in found).backward()
        sum(e.square().sum() for e in expected).backward()
        assert_trained_alike(twin, model)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_list_of_dicts_with_one_entry_per_row(workers):
    def detect(module, x):
        out = module.linear(x)
        return [{"boxes": out[k : k + 1], "id": int(x[k, 0] * 10)} for k in range(len(x))]

    twin, model = both(detect, workers)
    with model:
        x = rows(7)
        found, expected = model(x), twin(x)
        same(found, expected)
        sum(f["boxes"].square().sum() for f in found).backward()
        sum(e["boxes"].square().sum() for e in expected).backward()
        assert_trained_alike(twin, model)


@pytest.mark.parametrize(
    "make",
    [
        lambda out: list(out),  # of equal shapes: columns or rows?
        lambda out: [row.sum() for row in out],
        lambda out: {"boxes": list(out)},
        lambda out: {"boxes": [{"box": row[:k]} for k, row in enumerate(out)]},
    ],
)
def test_a_list_that_may_be_rows_or_columns_is_loud(make):
    _, model = both(lambda m, x: make(m.linear(x)), 2)
    with model:
        with pytest.raises(GatherError, match="rows"):
            model(rows(8))
        with pytest.raises(GatherError, match="rows"):
            model(rows(2))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("num", [4, 5, 8, 9])
def test_lists_of_columns(workers, num):
    """Two features in a list, also for shards of two rows, once the model is known to return two."""
    twin, model = both(
        lambda m, x: [m.linear(x), m.linear(x) * 2, [m.linear(x).mean(), 3 * m.linear(x).mean()]], workers
    )
    with model:
        model(rows(31))
        for _ in range(4):
            found, expected = model(rows(num)), twin(rows(num))
            same(found, expected)


def test_different_structures_are_loud():
    _, model = both(lambda m, x: {"a": x} if x[0, 0] > 0 else {"b": x}, 2)
    with model:
        x = rows(4)
        x[:2], x[2:] = 1.0, -1.0
        with pytest.raises(GatherError, match="different structures"):
            model(x)
        assert torch.equal(model(x.abs())["a"].fetch(), x.abs())


@pytest.mark.parametrize("workers", WORKERS)
def test_objects_among_outputs(workers):
    _, model = both(lambda m, x: (x, "word", len(x), float(len(x)), {"k": 3}, None, True), workers)
    with model, torch.no_grad():
        for _ in range(5):
            found = model(rows(6))
            assert found[1] == "word"
            assert found[4] == {"k": 3}
            assert found[5] is None
            assert found[6] is True
            if workers == 4:  # shards of 2, 2, 1, 1
                assert isinstance(found[2], Shards)
                assert found[2].shards == [2, 2, 1, 1]
                with pytest.raises(GatherError):
                    found[2].bit_length()
                assert found[3] == pytest.approx((2 * 4 + 2) / 6)


def test_python_numbers_by_reduction():
    _, model = both(
        lambda m, x: {"x": x, "n": len(x), "total": float(x.sum())}, 3, reduction={"n": "sum", "total": "sum"}
    )
    with model, torch.no_grad():
        x = rows(7)
        found = model(x)
        assert found["n"] == 7
        assert found["total"] == pytest.approx(float(x.sum()))


def test_reductions():
    def work(module, x):
        out = module.linear(x)
        return {"mean": out.mean(), "sum": out.sum(), "count": torch.tensor(len(x)), "big": x.max()}

    twin, model = both(work, 3, reduction={"sum": "sum", "count": "sum"})
    with model:
        x = rows(8)
        found, expected = model(x), twin(x)
        for name in ("mean", "sum", "count"):
            assert found[name].item() == pytest.approx(expected[name].item(), rel=1e-12), name
        assert found["count"].dtype == torch.int64
        (found["mean"] + 0.1 * found["sum"]).backward()
        (expected["mean"] + 0.1 * expected["sum"]).backward()
        assert_trained_alike(twin, model)
    with local(Apply(lambda m, x: m.linear(x).sum()), 3, reduction="sum") as model:
        assert model(rows(8)).item() == pytest.approx(model.module.linear(rows(8)).sum().item())
    with pytest.raises(ArgumentError):
        local(Apply(None), 0, reduction="max")


def test_output_device():
    _, model = both(lambda m, x: m.linear(x), 2, output_device="meta")
    with model:
        out = model(rows(4))
        assert out.device.type == "meta"
        assert (out + 1).device.type == "meta"


# ---- structure


@pytest.mark.parametrize("workers", WORKERS)
def test_a_changed_structure_is_found_on_the_workers(workers):
    def work(module, x):
        return {"a": module.linear(x)} if x[0, 0] < 100 else {"a": module.linear(x), "b": x}

    twin, model = both(work, workers)
    with model:
        for _ in range(4):
            model(rows(4))["a"].sum().backward()
        model.zero_grad()
        found = model(rows(4) + 1000)
        with pytest.raises(StructureChanged, match="dynamic_output=True"):
            found["a"].sum().backward()
        found = model(rows(4) + 1000)
        assert set(found) == {"a", "b"}
        model.zero_grad()
        model(rows(4))["a"].sum().backward()
        twin(rows(4))["a"].sum().backward()
        assert_trained_alike(twin, model)


@pytest.mark.parametrize("workers", WORKERS)
def test_dynamic_output(workers):
    def work(module, x):
        out = module.linear(x)
        return out if x[0, 0] < 100 else [out, out * 2]

    _, model = both(work, workers, dynamic_output=True)
    with model:
        for k in range(6):
            found = model(rows(4) + 1000 * (k % 2))
            assert isinstance(found, list) == bool(k % 2)
            plain(found[0] if k % 2 else found)


@pytest.mark.parametrize("workers", WORKERS)
def test_flags_and_modes_are_kinds_of_their_own(workers):
    def work(module, x, both=False, k=1):
        out = module.linear(x)
        return ((out,) * (2 + k)) if both or not module.training else out

    _, model = both(work, workers)
    with model:
        for _ in range(5):
            assert len(model(rows(4), both=True)) == 3
            assert model(rows(4)).shape == (4, 2)
            assert len(model(rows(4), both=True, k=2)) == 4
            model.eval()
            assert len(model(rows(4))) == 3
            model.train()


@pytest.mark.parametrize("workers", WORKERS)
def test_what_changes_an_outputs_kind_is_a_kind_of_its_own(workers):
    """dtype, dimensions, requires_grad of inputs and parameters, autocast, grad mode: none is a surprise."""
    _, model = both(lambda m, x: (x, m.linear(x.double().reshape(len(x), -1)[:, :3])), workers)
    with model:
        for _ in range(4):
            model(rows(4))[1].sum().backward()
        assert model(rows(4).requires_grad_())[0].requires_grad
        assert model(rows(4).int())[0].dtype == torch.int32
        assert model(rows(4)[:, None])[0].shape == (4, 1, 3)
        with torch.no_grad():
            assert not model(rows(4))[1].requires_grad
        with torch.inference_mode():
            assert not model(rows(4))[1].requires_grad
        model.module.linear.requires_grad_(False)
        for _ in range(4):
            assert not model(rows(4))[1].requires_grad
        model.module.linear.weight.requires_grad_(True)
        model(rows(4))[1].sum().backward()
        model.module.linear.requires_grad_(True)
        assert model(rows(4))[1].fetch().requires_grad


@pytest.mark.parametrize("workers", WORKERS)
def test_autocast_is_a_kind_of_its_own(workers):
    torch.manual_seed(0)
    with local(nn.Linear(3, 2), workers) as model:
        for _ in range(4):
            assert model(torch.ones(4, 3)).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.ones(4, 3))
        assert out.dtype == torch.bfloat16
        assert out.fetch().dtype == torch.bfloat16
        out = model(torch.ones(4, 3))
        with torch.autocast("cpu", dtype=torch.bfloat16):  # the wait is no part of the call
            assert out.fetch().dtype == torch.float32


@pytest.mark.parametrize("workers", WORKERS)
def test_shapes_are_no_kinds(workers):
    _, model = both(lambda m, x: m.linear(x), workers)
    with model:
        for n in (4, 5, 6, 7, 300):
            assert model(rows(n)).shape == (n, 2)
        assert len(model._caller.kinds) == 1


# ---- weights and microbatches


def language(module, x, y):
    logits = module.linear(x)
    return F.cross_entropy(logits, y, ignore_index=-100)


def tokens(x, y):
    return (y != -100).double()


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("microbatch_size", [None, 1, 2, 3])
def test_loss_weight(workers, microbatch_size):
    twin, model = both(language, workers, loss_weight=tokens, microbatch_size=microbatch_size)
    y = torch.tensor([0, -100, -100, -100, 1, 1, -100, 0])
    with model:
        loss = model(rows(8), y)
        expected = twin(rows(8), y)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        loss.backward()
        expected.backward()
        assert_trained_alike(twin, model)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (lambda x, y: torch.ones(3), "one number per row"),
        (lambda x, y: torch.ones(8, 2), "one number per row"),
        (lambda x, y: [1.0] * 9, "one number per row"),
        (lambda x, y: [-1.0] * 8, "not|0 or more"),
        (lambda x, y: [float("nan")] * 8, "0 or more"),
        (lambda x, y: torch.ones(()), "one number per row"),
        (lambda x, y: None, "one number per row"),
    ],
)
def test_wrong_loss_weights_raise_before_anything_is_sent(weights, words):
    _, model = both(language, 2, loss_weight=weights)
    with model:
        before = model._stream.num_messages
        with pytest.raises(ArgumentError, match=words):
            model(rows(8), torch.zeros(8, dtype=torch.int64))
        assert model._stream.num_messages == before


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 100])
def test_microbatches_are_exact(workers, microbatch_size):
    def work(module, x, y, names):
        out = module.linear(x)
        result = {"out": out, "loss": F.mse_loss(out, y), "count": torch.tensor(len(x)), "total": out.sum()}
        return {**result, "names": [n * 2 for n in names]}

    reduction = {"count": "sum", "total": "sum"}
    twin, model = both(work, workers, microbatch_size=microbatch_size, reduction=reduction)
    with model:
        x, y, names = rows(8).requires_grad_(), rows(8, 1)[:, :2], list("abcdefgh")
        for k in range(5):
            x.grad = None
            model.zero_grad()
            twin.zero_grad()
            found, expected = model(x, y, names), twin(x, y, names)
            (found["loss"] + (0.1 * found["total"] if k % 2 else found["out"].square().sum())).backward()
            ours, x.grad = x.grad, None
            (expected["loss"] + (0.1 * expected["total"] if k % 2 else expected["out"].square().sum())).backward()
            torch.testing.assert_close(ours, x.grad)
            assert_trained_alike(twin, model)
            same({n: found[n] for n in found}, expected)


class Counting(nn.Module):
    """Records how many of its graphs are alive at once."""

    alive = 0
    peak = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return Alive.apply(self.linear(x)).square().mean()


class Token:
    def __init__(self) -> None:
        Counting.alive += 1
        Counting.peak = max(Counting.peak, Counting.alive)

    def __del__(self) -> None:
        Counting.alive -= 1


class Alive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.token = Token()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_one_microbatch_graph_is_alive_at_a_time():
    Counting.alive = Counting.peak = 0
    with local(Counting(), 0, microbatch_size=2) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(16, 3)
        peaks = []
        for _ in range(6):
            Counting.peak = 0
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            model._stream.finish()
            peaks.append(Counting.peak)
        assert peaks[-1] == 1
        assert Counting.alive == 0


# ---- verbs


@pytest.mark.parametrize("workers", WORKERS)
def test_call_of_another_method(workers):
    twin, model = both(lambda m, x: m.linear(x), workers)
    with model:
        found = model.call("encode", rows(5))
        torch.testing.assert_close(found.fetch(), twin.encode(rows(5)))
        found.sum().backward()
        twin.encode(rows(5)).sum().backward()
        assert_trained_alike(twin, model)
        before = model._stream.num_messages
        with pytest.raises(ArgumentError, match="no method 'decode'"):
            model.call("decode", rows(5))
        assert model._stream.num_messages == before


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_backward_of_the_last_loss(workers, scale):
    twin, model = both(lambda m, x: (m.linear(x), m.linear(x).square().mean()), workers)
    with model:
        model(rows(5))
        model.backward(scale)
        (twin(rows(5))[1] * scale).backward()
        assert_trained_alike(twin, model)
        with pytest.raises(BackwardError, match="needs one loss"):
            model.backward()


def test_backward_needs_one_loss():
    _, model = both(lambda m, x, n: tuple(m.linear(x).mean() for _ in range(n)), 2)
    with model:
        with pytest.raises(BackwardError):
            model.backward()
        model(rows(4), 2)
        with pytest.raises(BackwardError, match="2 scalars"):
            model.backward()
        model(rows(4), 0)
        with pytest.raises(BackwardError, match="0 scalars"):
            model.backward()
        with torch.no_grad():
            model(rows(4), 1)
        with pytest.raises(BackwardError):
            model.backward()
        model(rows(4), 1)
        model.backward()


@pytest.mark.parametrize("workers", WORKERS)
def test_inputs_are_taken_at_the_call_and_left_alone(workers):
    twin, model = both(lambda m, x: m.linear(x.mul_(2)), workers)
    with model:
        x = rows(5)
        for _ in range(4):
            model(x)
        assert torch.equal(x, rows(5))
        out = model(x)
        x.zero_()
        torch.testing.assert_close(out.fetch(), twin(rows(5)))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).bfloat16(),
        torch.arange(6).half(),
        torch.arange(6) > 2,
        torch.arange(6).to(torch.uint8),
        torch.arange(6).to(torch.complex64),
        torch.randn(6, 4).t().contiguous().t(),
        torch.randn(6, 2, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(12)[::2],
        torch.randn(1).expand(6),
        torch.randn(6, 0),
    ],
    ids=lambda v: f"{str(v.dtype)[6:]}-{list(v.shape)}",
)
def test_every_dtype_and_layout_travels(workers, value):
    _, model = both(lambda m, x: x, workers)
    with model, torch.no_grad():
        found = model(value).fetch()
        assert found.dtype == value.dtype
        assert torch.equal(found, value)


@pytest.mark.parametrize("workers", WORKERS)
def test_batch_norm_with_five_rows(workers):
    """Shards of one row: torch's own error, on the workers, and the model stays usable."""
    torch.manual_seed(0)
    with local(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), workers) as model:
        x = torch.randn(5, 3)
        if workers == 4:
            with pytest.raises(ValueError, match="more than 1 value per channel"):
                model(x).fetch()
        else:
            assert model(x).shape == (5, 4)
        assert model(x.repeat(2, 1)).shape == (10, 4)

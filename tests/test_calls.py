"""Calls on a worker: random numbers, pieces of a shard, and backward from all that may seed it.

Expected values come from plain PyTorch on the whole shard.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdl_ray import tree
from torchdl_ray.calls import Call, Calls, Piece, describe
from torchdl_ray.errors import BackwardError, StructureChanged
from torchdl_ray.layout import Layout
from torchdl_ray.program import (
    Autocast,
    Backward,
    Cut,
    Forward,
    LeafKind,
    Link,
    RandomKey,
    Remote,
    Same,
    Seed,
    ShardData,
    WireTensor,
)

CPU = torch.device("cpu")
KEY = RandomKey(1, 2, 3)


def wire(tensor: Tensor) -> WireTensor:
    """As arrays arrive: read-only."""
    found = tree.to_wire(tensor, copy=True)
    found.array.flags.writeable = False
    return found


def forward(*leaves: Any, call: int = 1, differentiable: tuple[int, ...] = (), **fields: Any) -> Forward:
    """A command that calls the module with these positional leaves."""
    _, spec = tree.flatten((tuple(range(len(leaves))), {}))
    defaults: dict[str, Any] = {
        "id": 10 + call, "model": 0, "method": "forward", "grad": True, "inference": False, "training": True,
        "autocast": None, "key": KEY, "dim": 0, "reduction": "mean", "out_dims": None, "expected": None,
    }  # fmt: skip
    template = pickle.dumps((list(leaves), spec))
    return Forward(**{**defaults, **fields}, call=call, template=template, differentiable=differentiable)


def shard(*arrays: Tensor, microbatch_size: int | None = None, rows: int | None = None) -> ShardData:
    """All rows of a batch as one shard."""
    number = arrays[0].shape[0] if rows is None else rows
    pieces = Layout(1).shards(number, None, microbatch_size)[0].pieces
    return ShardData(0, number, pieces, tuple(wire(a) for a in arrays))


def backward(*seeds: Seed, call: int = 1, **fields: Any) -> Backward:
    return Backward(**{"id": 99, "model": 0, "call": call, "keep_graph": False, "full": True, **fields}, seeds=seeds)


def constant(leaf: int = 0, value: float = 1.0, weighted: bool = True) -> Seed:
    return Seed(leaf, wire(torch.tensor(value, dtype=torch.float64)), weighted)


def nothing() -> None:
    pass


def data(rows: int, columns: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """Returns rows and their mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x: Tensor, scale: Any = 1.0) -> tuple[Tensor, Tensor]:
        out = torch.tanh(self.layer(x)) * scale
        return out, out.square().mean()


def grads(net: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in net.named_parameters()}


def assert_close(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad)


# ---- random numbers


def test_a_replay_draws_the_same_and_other_pieces_differ() -> None:
    ones = torch.ones(8, 100, dtype=torch.float64)
    module = nn.Dropout(0.5)

    def run(data: ShardData, key: RandomKey = KEY) -> Tensor:
        torch.manual_seed(torch.seed())
        found: Tensor = Calls(CPU).forward(module, forward(Cut(0), key=key), data, ()).value(0)
        return found

    first = run(shard(ones, microbatch_size=2))
    assert torch.equal(first, run(shard(ones, microbatch_size=2)))
    pieces = list(first.split(2))
    others = [run(shard(ones[:2]), k) for k in (RandomKey(9, 2, 3), RandomKey(1, 9, 3), RandomKey(1, 2, 9))]
    others.append(run(replace(shard(ones[:2]), index=1)))
    assert torch.equal(pieces[0], run(shard(ones[:2])))
    for a, b in itertools.combinations([*pieces, *others], 2):
        assert not torch.equal(a, b)


# ---- forward


@pytest.mark.parametrize("microbatch_size", [None, 7, 3, 2, 1])
def test_outputs_of_pieces_join(microbatch_size: int | None) -> None:
    x = data(7)
    call = Calls(CPU).forward(Net(), forward(Cut(0)), shard(x, microbatch_size=microbatch_size), ())
    rows, mean = Net()(x)
    torch.testing.assert_close(call.value(0), rows.detach())
    torch.testing.assert_close(call.value(1), mean.detach())
    assert not call.value(0).requires_grad
    assert len(call.pieces) == (1 if microbatch_size is None else -(-7 // microbatch_size))
    assert call.shapes() == ((7, 2), ())
    told = call.result()
    assert told.shapes == ((7, 2), ())
    ((leaf, value),) = told.scalars
    assert leaf == 1
    assert value == pytest.approx(mean.item())
    assert told.structure is not None
    assert told.structure.leaves[1] == LeafKind(True, "float64", 0, True)


def test_a_shard_without_rows_runs_nothing() -> None:
    calls = Calls(CPU)
    data = ShardData(3, 0, (), ())
    call = calls.forward(Net(), forward(Cut(0)), data, ())
    assert call.shapes() == ()
    assert not call.result().ran
    armed: list[int] = []
    assert calls.backward(backward(constant(1), inputs=(0,)), (), lambda: armed.append(1)) == (None,)
    assert not armed


def test_what_is_common_is_whole_in_each_piece_and_fresh() -> None:
    """A module that writes to an argument sees only its own piece's writes, as without pieces."""

    class Writes(nn.Module):
        def forward(self, x: Tensor, common: Tensor) -> Tensor:
            common.mul_(2.0)
            x.mul_(3.0)
            return x * common

    x, common = data(4), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    kept = x.clone()
    command = forward(Cut(0), Same(0), grad=False)
    call = Calls(CPU).forward(Writes(), command, shard(x, microbatch_size=1), (wire(common),))
    torch.testing.assert_close(call.value(0), kept * 3 * common * 2)
    assert torch.equal(x, kept)


def test_methods_modes_and_autocast() -> None:
    class Modes(nn.Module):
        def other(self, x: Tensor) -> list[Any]:
            a = torch.ones(2, 2)
            return [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), str((a @ a).dtype), x]

    def run(**fields: Any) -> list[Any]:
        command = forward(Cut(0), method="other", **fields)
        call = Calls(CPU).forward(Modes(), command, shard(data(2)), ())
        return [call.value(k) for k in range(3)]

    assert run() == [True, False, "torch.float32"]
    assert run(grad=False) == [False, False, "torch.float32"]
    assert run(inference=True) == [False, True, "torch.float32"]
    assert run(autocast=Autocast(True, "bfloat16")) == [True, False, "torch.bfloat16"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run() == [True, False, "torch.float32"]


def test_an_output_of_a_call_feeds_another() -> None:
    calls, net = Calls(CPU), Net()
    x = data(5)
    calls.forward(net, forward(Cut(0)), shard(x, microbatch_size=2), ())
    second = calls.forward(nn.Identity(), forward(Remote(1, 0), call=2), shard(x, microbatch_size=3), ())
    torch.testing.assert_close(second.value(0), Net()(x)[0].detach())


def test_a_scalar_that_is_a_parameter_keeps_its_value() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.p

    net = Scalar()
    call = Calls(CPU).forward(net, forward(Cut(0)), shard(data(2)), ())
    with torch.no_grad():
        net.p.fill_(5.0)
    assert call.value(0).item() == 1.0


def test_changed_structures_are_refused() -> None:
    class Varies(nn.Module):
        def forward(self, x: Tensor, n: int) -> Any:
            return [x] * (n if n < 9 else len(x))

    calls, net, x = Calls(CPU), Varies(), data(5)
    first = calls.forward(net, forward(Cut(0), 1), shard(x), ())
    assert first.structure is not None
    calls.forward(net, forward(Cut(0), 1, expected=first.structure), shard(x), ())
    with pytest.raises(StructureChanged, match=r"returned 2 value.* but 1 value"):
        calls.forward(net, forward(Cut(0), 2, expected=first.structure), shard(x), ())
    with pytest.raises(StructureChanged, match="leave out microbatch_size"):
        calls.forward(net, forward(Cut(0), 9), shard(x, microbatch_size=3), ())
    assert "float64 of 2 dimensions" in describe(first.structure)


def test_objects_travel_beside_tensors() -> None:
    class Objects(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"rows": x, "name": "net", "none": None}

    told = Calls(CPU).forward(Objects(), forward(Cut(0)), shard(data(2)), ()).result()
    assert list(pickle.loads(told.objects).values()) == ["net"]
    assert told.shapes == ((2, 3), None, None)


# ---- backward


@pytest.mark.parametrize("microbatch_size", [None, 3, 1])
def test_backward_from_a_constant(microbatch_size: int | None) -> None:
    """The gradient of the mean, whatever the pieces; arms before the last one only."""
    x, net, calls = data(7), Net(), Calls(CPU)
    call = calls.forward(net, forward(Cut(0)), shard(x, microbatch_size=microbatch_size), ())
    seen: list[bool] = []
    hook = net.layer.bias.register_post_accumulate_grad_hook(lambda p: seen.append(False))
    calls.backward(backward(constant(1, 2.0)), (), lambda: seen.append(True))
    hook.remove()
    assert seen == [False] * (len(call.pieces) - 1) + [True, False]
    plain = Net()
    (2.0 * plain(x)[1]).backward()
    assert_close(grads(net), grads(plain))
    with pytest.raises(BackwardError, match="retain_graph=True"):
        calls.backward(backward(constant(1)), (), nothing)


def test_a_shard_of_a_batch_scales_by_its_share() -> None:
    x, net = data(7), Net()
    for plan in Layout(3).shards(7, [0, 1, 2, 3, 4, 5, 0], microbatch_size=2):
        calls = Calls(CPU)
        part = ShardData(plan.index, plan.rows, plan.pieces, (wire(x[plan.start : plan.stop]),))
        calls.forward(net, forward(Cut(0)), part, ())
        calls.backward(backward(constant(1)), (), nothing)
    # each piece's loss is the mean over its rows, and counts by its weight
    plain = Net()
    shares = [((0, 2), 1 / 15), ((2, 3), 2 / 15), ((3, 5), 7 / 15), ((5, 7), 5 / 15)]
    sum(plain(x[a:b])[1] * share for (a, b), share in shares).backward()
    assert_close(grads(net), grads(plain))


def test_a_piece_without_weight_has_no_nan() -> None:
    class Sick(Net):
        def forward(self, x: Tensor, scale: Any = 1.0) -> tuple[Tensor, Tensor]:
            out, loss = super().forward(x)
            return out, loss / (x.abs().sum() * scale).ne(0)

    net, calls = Sick(), Calls(CPU)
    x = torch.cat([torch.zeros(2, 3, dtype=torch.float64), data(2)])
    part = replace(shard(x), pieces=((2, 0.0), (2, 1.0)))
    calls.forward(net, forward(Cut(0)), part, ())
    calls.backward(backward(constant(1)), (), nothing)
    plain = Net()
    plain(x[2:])[1].backward()
    assert_close(grads(net), grads(plain))


@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("full", [True, False])
def test_rows_of_gradients_and_gradients_of_inputs(microbatch_size: int | None, full: bool) -> None:
    x, scale, seed = data(5), data(1, 2, seed=3)[0], data(5, 2, seed=4)
    net, calls = Net(), Calls(CPU)
    command = forward(Cut(0), Same(0), differentiable=(0, 1))
    calls.forward(net, command, shard(x, microbatch_size=microbatch_size), (wire(scale),))
    found = calls.backward(backward(Seed(0, Cut(0)), full=full, inputs=(0, 1)), (wire(seed),), nothing)
    plain = Net()
    x, scale = x.clone().requires_grad_(), scale.clone().requires_grad_()
    plain(x, scale)[0].backward(seed)
    torch.testing.assert_close(tree.from_wire(found[0]), x.grad)
    torch.testing.assert_close(tree.from_wire(found[1]), scale.grad)
    assert_close(grads(net), grads(plain) if full else dict.fromkeys(grads(plain)))


@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_gradient_of_ones_own_for_a_scalar(microbatch_size: int | None, reduction: str) -> None:
    """A driver that reads losses by replica sends a gradient for each."""
    x, net, calls = data(5), Net(), Calls(CPU)
    command = forward(Cut(0), reduction=reduction)
    call = calls.forward(net, command, shard(x, microbatch_size=microbatch_size), ())
    seed = torch.tensor(3.0, dtype=torch.float64)
    calls.backward(backward(Seed(1, Cut(0))), (wire(seed),), nothing)
    plain = Net()
    parts = [(plain(part)[1], len(part) / 5) for part in x.split([p.rows for p in call.pieces])]
    for loss, share in parts:
        (3.0 * loss * (share if reduction == "mean" else 1.0)).backward()
    assert_close(grads(net), grads(plain))


@pytest.mark.parametrize("sizes", [(None, None), (2, None), (None, 2), (2, 3)])
def test_gradients_link_calls(sizes: tuple[int | None, int | None]) -> None:
    """The gradient of a call's input stays on the worker for the call that made it."""
    x, first, second, calls = data(5), nn.Linear(3, 3).double(), Net(), Calls(CPU)
    calls.forward(first, forward(Cut(0)), shard(x, microbatch_size=sizes[0]), ())
    chained = forward(Remote(1, 0), call=2, differentiable=(0,))
    calls.forward(second, chained, shard(x, microbatch_size=sizes[1]), ())
    calls.backward(backward(constant(1), call=2, id=30, links=(0,)), (), nothing)
    assert list(calls.links) == [Link(30, 0)]
    calls.backward(backward(Seed(0, Link(30, 0))), (), nothing)
    assert not calls.links
    found = [grads(first), grads(second)]
    second.zero_grad()
    found[0] = {n: None if g is None else g.clone() for n, g in found[0].items()}
    first.zero_grad()
    second(first(x))[1].backward()
    assert_close(found[0], grads(first))
    assert_close(found[1], grads(second))


def test_a_graph_is_kept_on_demand_and_dropped() -> None:
    x, net, calls = data(4), Net(), Calls(CPU)
    calls.forward(net, forward(Cut(0)), shard(x), ())
    calls.backward(backward(constant(1), keep_graph=True), (), nothing)
    calls.backward(backward(constant(1)), (), nothing)
    plain = Net()
    (2 * plain(x)[1]).backward()
    assert_close(grads(net), grads(plain))
    calls.drop([1, 77])
    with pytest.raises(BackwardError, match="call 1 is gone"):
        calls.backward(backward(constant(1)), (), nothing)
    calls.forward(net, forward(Cut(0)), shard(x), ())
    calls.clear()
    assert not calls.live


def test_one_piece_is_alive_at_a_time() -> None:
    """With a backward after each piece, the graph of the piece before is gone when the next one runs."""
    alive: list[weakref.ref[Any]] = []
    counts: list[int] = []

    class Watched(Net):
        def forward(self, x: Tensor, scale: Any = 1.0) -> tuple[Tensor, Tensor]:
            gc.collect()
            counts.append(sum(r() is not None for r in alive))
            hidden = torch.tanh(self.layer(x))
            alive.append(weakref.ref(hidden))
            return hidden, hidden.square().mean()

    net, calls, command = Watched(), Calls(CPU), backward(constant(1))

    def each(call: Call, piece: Piece, last: bool) -> None:
        calls.piece_backward(call, piece, command, (), 0)
        piece.outputs = [x.detach().clone() for x in piece.outputs]

    x = data(6)
    call = calls.forward(net, forward(Cut(0)), shard(x, microbatch_size=2), (), each)
    assert counts == [0, 0, 0]
    plain = Net()
    plain(x)[1].backward()
    assert_close(grads(net), grads(plain))
    assert call.value(0).shape == (6, 2)


def test_outputs_that_need_no_gradient_and_entries_of_longer_lists() -> None:
    net, calls = Net(), Calls(CPU)
    net.layer.requires_grad_(False)
    calls.forward(net, forward(Cut(0)), shard(data(2)), ())
    calls.backward(backward(constant(1), constant(7)), (), nothing)
    assert all(g is None for g in grads(net).values())

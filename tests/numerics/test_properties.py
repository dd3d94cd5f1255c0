"""Promise 1 on drawn cases: loss, outputs and gradients equal those of one plain process on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchdl_ray import DataParallel

FEATURES, CLASSES = 4, 3
COUNTS = [1, 2, 3, 4, 5]


class Model(nn.Module):
    """Logits, losses and counts of a drawn batch, in the nesting that the batch has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6, dtype=dtype)
        self.second = nn.Linear(6, CLASSES, dtype=dtype)
        self.unused = nn.Linear(2, 2, dtype=dtype)

    def forward(self, batch, y, scale=None):
        x = find(batch)
        logits = self.second(torch.tanh(self.first(x)))
        if scale is not None:
            logits = logits * scale
        loss = F.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, y, ignore_index=-100)
        total = F.cross_entropy(logits.double(), y, reduction="sum", ignore_index=-100)
        return {"logits": logits, "batch": batch, "loss": loss, "total": total, "count": (y != -100).sum()}


def find(batch: Any) -> torch.Tensor:
    if isinstance(batch, torch.Tensor):
        return batch
    return find(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def valid(batch, y, scale=None):
    return (y != -100).double()


NESTINGS = {
    "plain": lambda x: x,
    "dict": lambda x: {"x": x, "mask": x > 0},
    "tuple": lambda x: (x, None, "word"),
    "deep": lambda x: {"a": [(x, x.long()), {"b": 3}], "c": True},
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@pytest.fixture(scope="module")
def models():
    """One model per number of workers, dtype and microbatch size, made when it is first drawn."""
    made: dict[Any, tuple[Model, DataParallel]] = {}

    def get(workers: int, dtype: torch.dtype, microbatch_size: int | None) -> tuple[Model, DataParallel]:
        key = workers, dtype, microbatch_size
        if key not in made:
            torch.manual_seed(0)
            twin = Model(dtype)
            options = {"loss_weight": valid, "reduction": {"total": "sum", "count": "sum"}}
            model = DataParallel(
                copy.deepcopy(twin), workers, backend="local", microbatch_size=microbatch_size, timeout_s=30, **options
            )
            made[key] = twin, model
        twin, model = made[key]
        twin.zero_grad()
        model.zero_grad()
        return twin, model

    yield get
    for _, model in made.values():
        model.close()


def close(found: Any, expected: Any, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    found = found.fetch() if hasattr(found, "fetch") else found
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def same_gradients(twin: nn.Module, model: DataParallel, dtype: torch.dtype) -> None:
    for (name, theirs), (_, ours) in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        assert (theirs.grad is None) == (ours.grad is None), name
        if theirs.grad is not None:
            close(torch.from_numpy(ours.grad.numpy()), theirs.grad, dtype)


@settings(max_examples=60)
@given(
    workers=st.sampled_from(COUNTS),
    rows=st.integers(1, 13),
    dtype=st.sampled_from(list(TOLERANCE)),
    microbatch_size=st.sampled_from([None, 1, 3]),
    nesting=st.sampled_from(list(NESTINGS)),
    ignored=st.sets(st.integers(1, 12)),
    use=st.sampled_from(["loss", "scaled", "total", "driver", "mixture", "backward"]),
    seed=st.integers(0, 1000),
    wants=st.booleans(),
)
def test_equal_to_one_process(models, workers, rows, dtype, microbatch_size, nesting, ignored, use, seed, wants):
    twin, model = models(workers, dtype, microbatch_size)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, dtype=dtype, generator=generator).requires_grad_(wants)
    y = torch.randint(0, CLASSES, (rows,), generator=generator)
    y[[k for k in ignored if k < rows]] = -100  # the first row always counts
    scale = torch.tensor(1.5, dtype=dtype, requires_grad=True)
    weights = torch.randn(rows, CLASSES, dtype=dtype, generator=generator)
    results = []
    for side in (model, twin):
        x.grad = scale.grad = None
        out = side(NESTINGS[nesting](x), y, scale=scale)
        loss = {
            "loss": lambda out=out: out["loss"],
            "scaled": lambda out=out: (out["loss"] * 3 + 1 - out["loss"].detach()) / 4,
            "total": lambda out=out: out["total"] / out["count"],
            "driver": lambda out=out: (out["logits"] * weights).sum(),
            "mixture": lambda out=out: out["loss"] + 0.1 * out["total"] + (out["logits"] * weights).mean(),
            "backward": lambda out=out: out["loss"] * 0.5,
        }[use]()
        loss.backward()
        results.append((loss, out["logits"], out["loss"], out["total"], out["count"], x.grad, scale.grad))
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            close(ours, theirs, dtype)
    same_gradients(twin, model, dtype)


@settings(max_examples=25)
@given(
    workers=st.sampled_from(COUNTS),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    microbatch_size=st.sampled_from([None, 2]),
    seed=st.integers(0, 1000),
    chained=st.booleans(),
)
def test_accumulated_calls(models, workers, sizes, microbatch_size, seed, chained):
    """Several calls of several sizes: summed before one backward, or one backward each."""
    twin, model = models(workers, torch.float64, microbatch_size)
    values = []
    for side in (model, twin):
        generator = torch.Generator().manual_seed(seed)
        losses = []
        for size in sizes:
            x = torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)
            y = torch.randint(0, CLASSES, (size,), generator=generator)
            loss = side(x, y)["loss"] / len(sizes)
            if not chained:
                loss.backward()
            losses.append(loss)
        total = sum(losses)
        if chained:
            total.backward()
        values.append(total.item())
    assert values[0] == pytest.approx(values[1], rel=1e-10)
    same_gradients(twin, model, torch.float64)


@settings(max_examples=25)
@given(
    workers=st.sampled_from(COUNTS),
    rows=st.integers(1, 11),
    dtype=st.sampled_from(
        [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    ),
    shape=st.lists(st.integers(0, 3), max_size=2),
    nesting=st.sampled_from(list(NESTINGS)),
)
def test_what_goes_in_comes_out(echo, workers, rows, dtype, shape, nesting):
    x = torch.randn(rows, *shape).mul(3).to(dtype)
    batch = NESTINGS[nesting](x) if dtype != torch.complex64 else x
    for _ in range(2):
        found = find(echo(workers)(batch)).fetch()
        assert found.dtype == x.dtype
        assert torch.equal(found, x)


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return batch


@pytest.fixture(scope="module")
def echo():
    made: dict[int, DataParallel] = {}

    def get(workers: int) -> DataParallel:
        if workers not in made:
            made[workers] = DataParallel(Echo(), workers, backend="local", timeout_s=30)
        return made[workers]

    yield get
    for model in made.values():
        model.close()

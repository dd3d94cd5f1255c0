"""The same model twice, on workers and as plain PyTorch, each with its optimizer: what tests of optimizers compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdl_ray.data_parallel import DataParallel

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def build_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(i: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + i)
    x = torch.randn(rows, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


class Pair:
    """`workers` 0: one worker in this process and in this thread."""

    def __init__(self, workers: int = 0, make: Make | None = None, **options: Any) -> None:
        self.model = DataParallel(build_net(), workers, backend="local" if workers else "auto", **options)
        self.net = self.model.module
        self.plain = build_net()
        self.sides = [(self.model, self.net), (self.plain, self.plain)]
        self.optimizers = [make(list(m.parameters())) for _, m in self.sides] if make is not None else []

    def step(self, i: int) -> None:
        for (call, _), optimizer in zip(self.sides, self.optimizers, strict=True):
            optimizer.zero_grad()
            x, y = batch(i)
            F.cross_entropy(call(x), y).backward()
            optimizer.step()

    def check(self, exact: bool = True) -> None:
        assert_equal(self.model.state_dict(), self.plain.state_dict(), exact)
        if self.optimizers:
            assert_equal(*[o.state_dict() for o in self.optimizers], exact)


def assert_equal(a: Any, b: Any, exact: bool = True, path: str = "") -> None:
    """Compare nested values; tensors by their bits, or closely."""
    assert type(a) is type(b) or isinstance(a, int | float | dict), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], exact, f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, exact, f"{path}[{i}]")
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-6, atol=1e-8), f"{path}: {a} {b}"
    elif isinstance(a, float) and not exact:
        assert a == pytest.approx(b, rel=1e-9), path
    else:
        assert a == b, path

"""The same model twice, remote and plain, for tests that run one piece of user code on both and compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdl_ray.data_parallel import DataParallel


class MeanNorm(nn.BatchNorm1d):
    """A normalisation whose running mean is linear in the rows, so that shards give what the whole batch does."""

    def forward(self, x: Tensor) -> Tensor:
        mean = self.running_mean.clone()
        if self.training:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                self.running_mean.mul_(1 - self.momentum).add_(x.mean(0), alpha=self.momentum)
        return F.batch_norm(x, mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Net(nn.Module):
    """Two layers with a normalisation, a dropout, a plain attribute and a buffer of its own."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8) if workers == 1 else MeanNorm(8)
        self.drop = nn.Dropout(0.0)
        self.second = nn.Linear(8, 3)
        self.head = nn.Linear(8, 3)
        self.gain = 1.0
        self.settings = {"use_head": False}
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(torch.tanh(self.first(x))))
        last = self.head if self.settings["use_head"] else self.second
        return last(hidden) * self.gain + self.shift


class Side:
    """One of the two: what user code sees."""

    def __init__(self, call: nn.Module, net: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.call, self.net = call, net
        self.opt = make(net.parameters())
        self.w: nn.Parameter = net.first.weight
        self.b: nn.Parameter = net.second.bias
        self.unused: nn.Parameter = net.head.weight
        self.steps = 0
        self.remote = isinstance(call, DataParallel)

    def loss(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.steps)
        x = torch.randn(8, 5, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 3, (8,), generator=generator)
        return F.cross_entropy(self.call(x), y)

    def backward(self) -> None:
        self.opt.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        self.backward()
        self.opt.step()
        self.steps += 1

    def forward(self) -> Tensor:
        """An evaluation without side effects."""
        self.call.eval()
        with torch.no_grad():
            out = self.call(torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5))
            out = out + 0  # fetched
        self.call.train()
        return out


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def compare(script: Callable[[Side], Any], workers: int, make: Callable[[Any], torch.optim.Optimizer] = sgd) -> None:
    """Run a piece of user code on both sides; what it returns and all weights have to be the same."""
    torch.manual_seed(0)
    net = Net(workers).double()
    plain = Side(twin := copy.deepcopy(net), twin, make)
    with DataParallel(net, workers, backend="local") as model:
        remote = Side(model, net, make)
        torch.manual_seed(1)
        found = plainly(script(remote))
        state = {k: v.clone() for k, v in model.state_dict().items()}
        model.check_sync()
    torch.manual_seed(1)
    expected = plainly(script(plain))
    tolerance = {"rtol": 0, "atol": 0} if workers == 1 else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **tolerance, equal_nan=True)
    torch.testing.assert_close(state, dict(plain.net.state_dict()), **tolerance)


def plainly(value: Any) -> Any:
    """The value with every tensor as a plain copy."""
    if isinstance(value, Tensor):
        return torch.as_tensor(value.detach().cpu().numpy().copy())
    if isinstance(value, dict):
        return {k: plainly(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plainly(v) for v in value]
    if isinstance(value, bool | str | None):
        return {"value": torch.tensor(hash(str(value)))}
    return value

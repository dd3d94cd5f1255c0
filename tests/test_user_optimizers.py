"""Optimizers that users write: subclasses, wrappers, odd attributes; and steps that fail."""

from __future__ import annotations

import collections
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ray import cloudpickle
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchdl_ray import optim, program
from torchdl_ray.errors import UnsupportedError

from .optimizer_pairs import Make, Pair, assert_equal, batch


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.model.close()


class Counting(torch.optim.SGD):
    """Calls super().step() and counts; its attributes are dropped by `Optimizer.__getstate__`."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.num_steps = 0
        self.scale = 0.5

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(self.scale)
        return super().step(closure)


class Logged:
    """A mixin before the stock class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> str:
        self.log.append(len(self.log))
        super().step(closure)
        return "stepped"


class LoggedAdam(Logged, torch.optim.Adam):
    pass


class Naive(Optimizer):
    """As in tutorials: no check for None, parameters in a list of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.flat = [p for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.flat:
            p.data.add_(p.grad.data, alpha=-self.param_groups[0]["lr"])


class Normed(Optimizer):
    """Scales by the norm of all gradients, which fails without parameters; keeps it in several places."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "norm_sum": 0.0})
        self.last_norm: float = 0.0
        self.history: list[float] = []
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        device = self.param_groups[0]["params"][0].device
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm().to(device)
        self.last_norm = float(norm)
        self.history.append(self.last_norm)
        for group in self.param_groups:
            group["k"] += 1
            group["norm_sum"] += self.last_norm
            for p, slow in zip(group["params"], self.slow, strict=False):
                p.add_(p.grad / norm, alpha=-group["lr"] / group["k"])
                slow.lerp_(p, 0.1)
        self.state["total"] = self.state.get("total", 0) + 1


class Gentle(Optimizer):
    """Counts in its groups and logs in place, and works without parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})
        self.seen: list[float] = []
        self.bits = torch.zeros(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> int:
        size = 0.0
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["weight_sum"] * 1e-3)
                    size += float(p.grad.abs().sum())
        self.seen.append(size)
        self.bits[0] += 1
        return 7


class Untidy(torch.optim.SGD):
    """Replaces gradients in its step, or clears them, and makes objects."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.clock = Clock(getattr(self, "clock", None))
        for i, p in enumerate(p for g in self.param_groups for p in g["params"]):
            if p.grad is not None:
                p.grad = p.grad * 0.5
                if i % 2:
                    p.add_(p.grad, alpha=-0.01)
                    p.grad = None
        return super().step(closure)


class Clock:
    def __init__(self, before: Clock | None) -> None:
        self.ticks = before.ticks + 1 if before is not None else 1


USERS: dict[str, Make] = {
    "untidy": lambda ps: Untidy(ps, lr=0.1, momentum=0.9),
    "counting": lambda ps: Counting(ps, 0.1),
    "mixin": lambda ps: LoggedAdam(ps, lr=1e-2),
    "naive": lambda ps: Naive(ps, 0.1),
    "normed": lambda ps: Normed(ps, 0.1),
    "gentle": lambda ps: Gentle(ps, 0.1),
}
ATTRIBUTES = ("num_steps", "log", "last_norm", "history", "slow", "seen", "bits")


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("sgd_is_hooked", [False, True])
def test_subclasses(name: str, sgd_is_hooked: bool, pairs: Callable[..., Pair]) -> None:
    if sgd_is_hooked:
        torch.optim.SGD([torch.zeros(1)])
        torch.optim.Adam([torch.zeros(1)])
    pair = pairs(0, USERS[name])
    ours, plain = pair.optimizers
    for i in range(8):
        pair.step(i)
        for attribute in ATTRIBUTES:
            if hasattr(plain, attribute) and attribute != "slow":
                assert_equal(getattr(ours, attribute), getattr(plain, attribute), path=attribute)
        if name in ("normed", "gentle"):
            assert ours.param_groups[0]["k"] == i + 1
            assert_equal(
                {k: v for k, v in ours.param_groups[0].items() if k != "params"},
                {k: v for k, v in plain.param_groups[0].items() if k != "params"},
            )
        for o in pair.optimizers:
            if i == 4:
                o.param_groups[0]["lr"] = 0.05
                o.scale = 0.25
    pair.check()
    if name == "normed":
        assert_equal(ours.slow, plain.slow)
    # state that is loaded, or read and changed, starts a new adoption with everything that steps changed
    for i in range(8, 12):
        for o in pair.optimizers:
            o.load_state_dict(o.state_dict())
        pair.step(i)
    pair.check()
    assert ours.step() == plain.step() or name in ("naive", "normed")


@pytest.mark.parametrize("name", ["counting", "mixin", "gentle"])
def test_subclasses_on_two_workers(name: str, pairs: Callable[..., Pair]) -> None:
    pair = pairs(2, USERS[name])
    for i in range(6):
        pair.step(i)
    pair.check(exact=False)
    assert len(set(pair.model.check_sync())) == 1


def test_gradients_that_a_step_changes(pairs: Callable[..., Pair]) -> None:
    pair = pairs(2, lambda ps: Untidy(ps, lr=0.1))
    for i in range(5):
        for (call, _), o in zip(pair.sides, pair.optimizers, strict=True):
            x, y = batch(i)
            F.cross_entropy(call(x), y).backward()  # on top of what the step has left
            o.step()
        assert pair.optimizers[0].clock.ticks == i + 1
    pair.check(exact=False)
    weights = [net[0].weight.grad for _, net in pair.sides]
    assert torch.allclose(weights[0], weights[1])


def test_a_differentiable_step_is_refused(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: torch.optim.SGD(ps, lr=0.1, differentiable=True))
    with pytest.raises(UnsupportedError, match="differentiable"):
        pair.optimizers[0].step()


SOURCE = """
import torch
limit = 0.01

class Clamped(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.clamp(-limit, limit), alpha=-group["lr"])
"""


def test_a_class_of_main(pairs: Callable[..., Pair]) -> None:
    main = sys.modules["__main__"]
    exec(compile(SOURCE, "notebook", "exec"), main.__dict__)
    try:
        pair = pairs(0, lambda ps: main.Clamped(ps))
        fired: list[int] = []
        handle = register_optimizer_step_pre_hook(lambda o, a, k: fired.append(1))
        for i in range(3):
            pair.step(i)
        handle.remove()
        pair.check()
    finally:
        del main.Clamped


def test_random_numbers_of_a_step_are_alike_on_all_workers(pairs: Callable[..., Pair]) -> None:
    pair = pairs(2, lambda ps: Noisy(ps, 0.1))
    before = pair.net[0].weight.detach().clone()
    for _ in range(3):
        pair.optimizers[0].step()
    assert len(set(pair.model.check_sync())) == 1
    assert not torch.equal(pair.net[0].weight, before)


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p), alpha=1e-3)
        return super().step(closure)


def test_an_attribute_that_cannot_travel_is_named(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: torch.optim.SGD(ps, lr=0.1))
    pair.optimizers[0].writer = (i for i in range(3))
    with pytest.raises(UnsupportedError, match="writer"):
        pair.step(0)
    del pair.optimizers[0].writer
    pair.optimizers[1].zero_grad()
    pair.step(0)
    pair.check()


# ---- closures and wrappers


def with_closure(pair: Pair, i: int) -> list[Tensor]:
    found = []
    for (call, _), o in zip(pair.sides, pair.optimizers, strict=True):

        def closure(call: Any = call, o: Optimizer = o) -> Tensor:
            o.zero_grad()
            x, y = batch(i)
            loss = F.cross_entropy(call(x), y)
            loss.backward()
            return loss

        found.append(o.step(closure))
    return found


class OwnClosure(torch.optim.Adam):
    """Calls the closure itself and then super().step() without one."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)
        super().step()
        return loss


@pytest.mark.parametrize("adam_is_hooked", [False, True])
def test_a_user_step_with_a_closure_runs_on_the_driver(adam_is_hooked: bool, pairs: Callable[..., Pair]) -> None:
    if adam_is_hooked:
        torch.optim.Adam([torch.zeros(1)])
    pair = pairs(0, lambda ps: OwnClosure(ps, lr=1e-2))
    with pytest.warns(UserWarning, match="has a closure"):
        found = [with_closure(pair, i) for i in range(4)]
    assert all(a.item() == b.item() for a, b in found)
    pair.check()


class Lookahead(Optimizer):
    """Keeps slow weights beside an inner optimizer; `hooked` as if it called Optimizer.__init__."""

    def __init__(self, inner: Optimizer, hooked: bool) -> None:
        self.inner = inner
        if hooked:
            super().__init__(inner.param_groups, {"alpha": 0.5})
        self.param_groups = inner.param_groups
        self.state = collections.defaultdict(dict)
        self.defaults = inner.defaults
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.data.clone())
                    slow.add_(p.data - slow, alpha=0.5)
                    p.data.copy_(slow)
        return loss


@pytest.mark.filterwarnings("ignore:Lookahead.step runs on the driver")
@pytest.mark.parametrize("hooked", [False, True])
def test_lookahead(hooked: bool, pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: Lookahead(torch.optim.Adam(ps, lr=1e-2), hooked))
    for i in range(8):
        for (call, _), o in zip(pair.sides, pair.optimizers, strict=True):
            o.inner.zero_grad()
            x, y = batch(i)
            F.cross_entropy(call(x), y).backward()
            o.step()
    assert_equal(pair.model.state_dict(), pair.plain.state_dict())
    assert_equal(*[o.inner.state_dict() for o in pair.optimizers])


class SAM(Optimizer):
    """Sharpness-aware minimisation (arXiv 2010.01412), as its common implementation."""

    def __init__(self, params: Any, base: type[Optimizer], rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        grads = [p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None]
        scale = self.param_groups[0]["rho"] / (torch.norm(torch.stack(grads), p=2) + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        return loss


def test_sam(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: SAM(ps, torch.optim.SGD, lr=0.1, momentum=0.9))
    with pytest.warns(UserWarning, match="SAM.step runs on the driver"):
        found = [with_closure(pair, i) for i in range(4)]
    assert all(a.item() == b.item() for a, b in found)
    assert_equal(pair.model.state_dict(), pair.plain.state_dict())
    assert_equal(*[o.base_optimizer.state_dict() for o in pair.optimizers])


# ---- failures


class Fragile(Optimizer):
    """Fails on the workers when its parameters' gradients are large; counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.abs().max() > 1e3:
                    raise FloatingPointError("too large")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["n"] = self.state[p].get("n", 0) + 1
                    p.add_(p.grad, alpha=-group["lr"])


def run(call: Any, o: Optimizer, i: int, scale: float = 1.0) -> None:
    o.zero_grad()
    x, y = batch(i)
    (F.cross_entropy(call(x), y) * scale).backward()
    o.step()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fails_at", [0, 3])
@pytest.mark.parametrize("sync", [False, True])
def test_a_step_that_fails_leaves_the_optimizer_usable(
    workers: int, fails_at: int, sync: bool, pairs: Callable[..., Pair]
) -> None:
    pair = pairs(workers, Fragile, sync=sync)
    ours, plain = pair.optimizers
    for i in range(fails_at):
        pair.step(i)
    with pytest.raises(FloatingPointError, match="too large"):
        run(pair.plain, plain, 99, scale=1e9)

    def fail() -> None:
        run(pair.model, ours, 99, scale=1e9)
        pair.model._stream.finish()

    with pytest.raises(FloatingPointError, match="too large"):
        fail()
    for o in pair.optimizers:
        o.param_groups[0]["lr"] = 0.05
    for i in range(5, 9):
        pair.step(i)
    pair.check(exact=workers == 0)
    assert ours.num_steps == plain.num_steps
    assert len(set(pair.model.check_sync())) == 1


def break_down(pair: Pair) -> None:
    """Record a command that fails on the workers, without waiting for it."""
    body = cloudpickle.dumps((lambda module: 1 / 0, (), {}))
    pair.model._stream.record(program.Run, model=pair.model._model, body=body)


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_failing_forward_drops_the_steps_after_it(fails_at: int, pairs: Callable[..., Pair]) -> None:
    pair = pairs(2, lambda ps: torch.optim.Adam(ps, lr=torch.tensor(1e-2)))
    ours, plain = pair.optimizers
    for i in range(fails_at):
        pair.step(i)

    def fail() -> None:
        ours.param_groups[0]["lr"].fill_(0.05)
        break_down(pair)
        ours.step()
        pair.model._stream.finish()

    with pytest.raises(ZeroDivisionError):
        fail()
    plain.param_groups[0]["lr"].fill_(0.05)
    if fails_at:
        assert_equal(ours.state_dict(), plain.state_dict(), exact=False)
    for i in range(5, 9):
        pair.step(i)
    pair.check(exact=False)


def test_loaded_state_survives_a_dropped_adoption(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: torch.optim.Adam(ps, lr=1e-2))
    ours = pair.optimizers[0]
    for i in range(2):
        pair.step(i)
    states = [copy.deepcopy(o.state_dict()) for o in pair.optimizers]
    for i in range(2, 4):
        pair.step(i)
    for o, state in zip(pair.optimizers, states, strict=True):
        o.load_state_dict(state)

    def fail() -> None:
        break_down(pair)
        ours.step()  # adopts the loaded state, but is dropped
        pair.model._stream.finish()

    with pytest.raises(ZeroDivisionError):
        fail()
    pair.check()
    for i in range(5, 8):
        pair.step(i)
    pair.check()


def test_release_after_a_loss_is_loud(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: torch.optim.Adam(ps, lr=1e-2))
    pair.step(0)
    pair.model._stream.close(RuntimeError("worker 0 died"))
    with pytest.warns(UserWarning, match="worker 0 died"):
        optim.release_optimizers(pair.model._parameters_hub)
    with pytest.raises(RuntimeError, match="worker 0 died"):
        pair.optimizers[0].state_dict()
    with pytest.warns(UserWarning, match="worker 0 died"):
        pair.model._parameters_hub.release()
    pair.optimizers[0].load_state_dict(pair.optimizers[1].state_dict())
    for o, (_, net) in zip(pair.optimizers, pair.sides, strict=True):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        o.step()
    assert_equal(*[o.state_dict() for o in pair.optimizers])

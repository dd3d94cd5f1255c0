"""What users do with `.grad`, on a remote model beside plain PyTorch: the same, or an error that says so."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import utils

from torchdl_ray import operations, program
from torchdl_ray.data_parallel import DataParallel
from torchdl_ray.errors import UnsupportedError
from torchdl_ray.operations import Local, Operation
from torchdl_ray.remote_gradient import RemoteGradient
from torchdl_ray.remote_parameter import hub_of

from .twins import Net, Side, compare


def grads(s: Side) -> list[Tensor]:
    return [p.grad for p in s.net.parameters() if p.grad is not None]


def each(change: Callable[[Tensor], Any]) -> Callable[[Side], Any]:
    def changed(s: Side) -> None:
        for g in grads(s):
            change(g)

    return changed


def assign_each(change: Callable[[Tensor], Tensor]) -> Callable[[Side], Any]:
    def changed(s: Side) -> None:
        for p in s.net.parameters():
            if p.grad is not None:
                p.grad = change(p.grad)

    return changed


def noise(g: Tensor) -> Tensor:
    return torch.linspace(-1, 1, g.numel(), dtype=g.dtype).view(g.shape)


def put(target: Any, key: Any, value: Any) -> None:
    target[key] = value


def assign(target: Any, value: Any) -> None:
    target.data = value


# Between backward and step. Those in REMOTE move no gradient to the driver.
REMOTE: dict[str, Callable[[Side], Any]] = {
    "clip_grad_norm_": lambda s: utils.clip_grad_norm_(s.net.parameters(), 0.1),
    "clip_grad_norm_ inf": lambda s: utils.clip_grad_norm_(s.net.parameters(), 0.1, norm_type=float("inf")),
    "clip_grad_norm_ one": lambda s: utils.clip_grad_norm_(s.w, 0.1, norm_type=1.0),
    "clip_grad_norm_ checked": lambda s: utils.clip_grad_norm_(s.net.parameters(), 0.1, error_if_nonfinite=True),
    "clip_grad_norm_ foreach": lambda s: utils.clip_grad_norm_(s.net.parameters(), 0.1, foreach=True),
    "clip_grad_norm_ twice": lambda s: [utils.clip_grad_norm_(s.net.parameters(), m) for m in (1.0, 0.1)],
    "clip_grad_value_": lambda s: utils.clip_grad_value_(s.net.parameters(), 0.01),
    "clip_grad_value_ foreach": lambda s: utils.clip_grad_value_(s.net.parameters(), 0.01, foreach=True),
    "get_total_norm": lambda s: utils.get_total_norm(grads(s)),
    "clip_grads_with_norm_": lambda s: utils.clip_grads_with_norm_(
        s.net.parameters(), 0.1, utils.get_total_norm(grads(s))
    ),
    "mul_": each(lambda g: g.mul_(0.5)),
    "div by a 0-dim tensor": each(lambda g: g.div_(torch.tensor(3.0))),
    "augmented": assign_each(lambda g: g.__itruediv__(3)),
    "data.clamp_": each(lambda g: g.data.clamp_(-0.01, 0.01)),
    "detach().mul_": each(lambda g: g.detach().mul_(0.5)),
    "view": each(lambda g: g.view(-1)[:2].mul_(0.5)),
    "setitem": each(lambda g: put(g, 0, 0.0)),
    "copy_ of itself": each(lambda g: g.copy_(g * 2)),
    "sign_": each(lambda g: g.sign_().mul_(0.01)),
    "nan_to_num_": each(lambda g: torch.nan_to_num_(g, 0.0)),
    "zero_": each(lambda g: g.zero_()),
    "assigned": assign_each(lambda g: g / 3),
    "assigned and changed": lambda s: [setattr(p, "grad", h := p.grad / 3) or h.mul_(2) for p in (s.w, s.b)] and None,
    "norm": lambda s: s.w.grad.norm(),
    "norms": lambda s: sum(g.detach().data.norm(2).item() ** 2 for g in grads(s)) ** 0.5,
    "stacked norms": lambda s: torch.norm(torch.stack([torch.norm(g.detach(), 2).to(g.device) for g in grads(s)]), 2),
    "foreach norm": lambda s: torch._foreach_norm(grads(s)),
    "foreach mul": lambda s: torch._foreach_mul_(grads(s), torch.tensor(0.5, dtype=torch.float64)),
    "isfinite": lambda s: [torch.isfinite(g).all().item() for g in grads(s)],
    "isnan": lambda s: any(bool(torch.isnan(g).any()) for g in grads(s)),
    "normalised": assign_each(lambda g: g / (g.norm() + 1e-6)),
    "centralised": each(lambda g: g.sub_(g.mean())),
    "mean": lambda s: [float(g.abs().mean()) for g in grads(s)],
    "dot": lambda s: torch.dot(s.w.grad.flatten(), s.w.grad.flatten() * 2),
    "max": lambda s: s.w.grad.max(),
    "scaled by a norm": each(lambda g: g.mul_((1.0 / g.norm()).clamp(max=1.0))),
    "scaled by another's norm": lambda s: s.b.grad.mul_(s.w.grad.norm()).sum(),
}

FETCHED: dict[str, Callable[[Side], Any]] = {
    "read": lambda s: [g + 0 for g in grads(s)],
    "numpy": lambda s: [g.numpy().copy().sum() for g in grads(s)],
    "cpu numpy": lambda s: s.w.grad.cpu().numpy().sum(),
    "tolist": lambda s: torch.tensor(s.w.grad.tolist()),
    "print": lambda s: f"{s.w.grad.sum():.6f}",
    "equal": lambda s: [torch.equal(s.w.grad, s.w.grad.clone()), torch.allclose(s.w.grad, s.w.grad + 0)],
    "deepcopy": lambda s: copy.deepcopy(s.w.grad),
    "pickle": lambda s: pickle.loads(pickle.dumps(s.w.grad)),
    "clone": lambda s: [g.clone() for g in grads(s)],
    "nonzero": lambda s: s.w.grad.nonzero(),
    "masked": lambda s: s.w.grad[s.w.grad > 0],
    "masked fill": each(lambda g: put(g, g.abs() < 0.01, 0.0)),
    "add_ noise": each(lambda g: g.add_(noise(g))),
    "add_ random": each(lambda g: g.add_(torch.randn_like(g), alpha=0.01)),
    "normal_": each(lambda g: g.normal_(0, 0.01)),
    "copy_": each(lambda g: g.copy_(noise(g))),
    "data = tensor": each(lambda g: assign(g, noise(g))),
    "assigned tensor": assign_each(noise),
    "assigned tensor, changed": lambda s: assigned_and_changed(s),
    "mixed": assign_each(lambda g: g + noise(g)),
    "weight decay": lambda s: [p.grad.add_(p, alpha=0.1) for p in s.net.parameters() if p.grad is not None] and None,
    "weight decay of data": lambda s: [p.grad.add_(p.data, alpha=0.1) for p in (s.w, s.b)] and None,
    "masked by parameters": lambda s: s.w.grad.mul_((s.w > 0).double()).sum(),
    "view_as": lambda s: s.w.grad.view(-1).view_as(torch.empty(5, 8)).sum(0),
    "flat": lambda s: utils.parameters_to_vector(grads(s)),
    "cat": lambda s: torch.cat([g.reshape(-1) for g in grads(s)]).norm(),
    "None for one": lambda s: setattr(s.w, "grad", None),
    "unused is None": lambda s: [s.unused.grad is None, s.net.head.bias.grad is None, s.w.grad is None],
    "assigned to the unused": lambda s: setattr(s.unused, "grad", torch.ones_like(s.unused)),
    "handle to the unused": lambda s: setattr(s.unused, "grad", s.unused.new_zeros(3, 8) + s.w.grad.norm()),
    "value to the unused": lambda s: setattr(s.net.head.bias, "grad", s.b.grad * 2),
    "assigned to the frozen": lambda s: frozen_and_assigned(s),
    "to another dtype": lambda s: s.w.grad.float().sum(),
    "zero_grad": lambda s: s.net.zero_grad() or [p.grad is None for p in s.net.parameters()],
    "zero_grad to zeros": lambda s: s.net.zero_grad(set_to_none=False) or [p.grad is None for p in s.net.parameters()],
    "zero_grad of the optimizer to zeros": lambda s: s.opt.zero_grad(set_to_none=False) or s.w.grad.sum(),
    "autograd on it": lambda s: through(s),
    "SVD": lambda s: torch.linalg.svdvals(s.w.grad),
    "quantile": lambda s: torch.quantile(s.w.grad, 0.9),
    "in a loss": lambda s: nn.functional.mse_loss(s.w.grad, noise(s.w.grad)),
    "chunks": lambda s: [c.sum() for c in s.w.grad.chunk(2)],
    "iterate": lambda s: [row.sum() for row in s.w.grad],
}


def assigned_and_changed(s: Side) -> Any:
    t = noise(s.w)
    s.w.grad = t
    assert s.w.grad is t
    t.mul_(2.0)
    s.opt.step()
    t.mul_(3.0)


def frozen_and_assigned(s: Side) -> None:
    s.unused.requires_grad_(False)
    s.unused.grad = torch.ones_like(s.unused)


def through(s: Side) -> Any:
    x = torch.ones(8, 5, dtype=torch.float64, requires_grad=True)
    (x * s.w.grad).sum().backward()
    return x.grad


ALL = {**REMOTE, **FETCHED}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_between_backward_and_step(name: str, workers: int):
    def script(s: Side) -> Any:
        s.step()
        s.backward()
        found = ALL[name](s)
        s.opt.step()
        s.step()
        return [found if found is not None else 0, s.forward()]

    compare(script, workers)


@pytest.mark.parametrize(
    "name", ["clip_grad_norm_", "mul_", "copy_", "assigned", "assigned tensor", "None for one", "zero_"]
)
def test_between_two_backwards(name: str):
    def script(s: Side) -> Any:
        s.step()
        s.backward()
        found = ALL[name](s)
        s.loss().backward()
        again = [g + 0 for g in grads(s)]
        s.opt.step()
        return [found if found is not None else 0, again, s.forward()]

    compare(script, 1)


# ---- handles that are kept


def kept_over_zero_grad(s: Side) -> Any:
    g, view = s.w.grad, s.w.grad.view(-1)[3:5]
    s.opt.zero_grad()
    assert s.w.grad is None
    s.loss().backward()
    return [g + 0, view + 0, s.w.grad + 0]


def kept_over_step(s: Side) -> Any:
    g = s.w.grad
    s.opt.step()
    return [g + 0, s.w.grad + 0]


def kept_over_backward(s: Side) -> Any:
    g, view, copied = s.w.grad, s.w.grad.view(-1), s.w.grad.clone()
    s.loss().backward()
    return [g + 0, view + 0, copied + 0]


def kept_over_zeroing(s: Side) -> Any:
    g = s.w.grad
    s.opt.zero_grad(set_to_none=False)
    first = g + 0
    s.loss().backward()
    return [first, g + 0]


def kept_over_assignment(s: Side) -> Any:
    g = s.w.grad
    s.w.grad = torch.ones_like(s.w)
    return [g + 0, s.w.grad + 0]


def kept_over_assigned_value(s: Side) -> Any:
    g = s.w.grad
    s.w.grad = g * 2
    s.w.grad.mul_(3)
    return [g + 0, s.w.grad + 0]


def kept_and_changed(s: Side) -> Any:
    g = s.w.grad
    s.opt.zero_grad()
    g.mul_(5)
    s.loss().backward()
    return [g + 0, s.w.grad + 0]


def given_back(s: Side) -> Any:
    saved = [p.grad.clone() if p.grad is not None else None for p in s.net.parameters()]
    s.opt.zero_grad()
    s.loss().backward()
    for p, g in zip(s.net.parameters(), saved, strict=True):
        if g is not None:
            p.grad.add_(g)
    return None


def projected(s: Side) -> Any:
    """PCGrad: the gradients of two losses, the conflicting part taken out."""
    first = [g.clone() for g in grads(s)]
    s.opt.zero_grad()
    (s.loss() * 2).backward()
    dot = sum((a * b).sum() for a, b in zip(first, grads(s), strict=True))
    square = sum((a * a).sum() for a in first)
    for p, a in zip([p for p in s.net.parameters() if p.grad is not None], first, strict=True):
        p.grad = p.grad - torch.clamp(dot, max=0.0) / square * a + a


def logged(s: Side) -> Any:
    return {n: p.grad.norm().item() for n, p in s.net.named_parameters() if p.grad is not None}


def looped_variable(s: Side) -> Any:
    total = 0.0
    for p in s.net.parameters():
        g = p.grad
        if g is not None:
            total = total + g.pow(2).sum()
    s.opt.step()
    s.step()
    return [total, g is None]


KEPT = [
    *(kept_over_zero_grad, kept_over_step, kept_over_backward, kept_over_zeroing, kept_over_assignment),
    *(kept_over_assigned_value, kept_and_changed, given_back, projected, logged, looped_variable),
]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("case", KEPT, ids=lambda f: f.__name__)
def test_kept(case: Callable[[Side], Any], workers: int):
    def script(s: Side) -> Any:
        s.step()
        s.backward()
        found = case(s)
        s.opt.step()
        s.step()
        return [found if found is not None else 0, s.forward()]

    compare(script, workers)


def test_frozen_parameters_keep_a_gradient_that_is_there():
    def script(s: Side) -> Any:
        s.step()
        s.backward()
        s.w.requires_grad_(False)
        s.loss().backward()
        found = [s.w.grad + 0]
        s.opt.step()
        s.opt.zero_grad()
        found.append(s.w.grad is None)
        s.step()
        return found

    compare(script, 2)


def test_nothing_waits_in_a_stock_loop():
    net = Net().double()
    with DataParallel(net, 0) as model:
        s = Side(model, net, lambda p: torch.optim.SGD(p, lr=0.1))
        s.step()
        hub = hub_of(s.w)
        learn = hub.gradients._learn
        hub.gradients._learn = lambda: pytest.fail("asked which gradients are None")
        for k in range(6):
            s.opt.zero_grad() if k % 2 else net.zero_grad()
            s.loss().backward()
            s.opt.step()
        hub.gradients._learn = learn


# ---- what raises


@pytest.fixture
def side():
    torch.manual_seed(0)
    net = Net().double()
    with DataParallel(net, 0) as model:
        s = Side(model, net, lambda p: torch.optim.SGD(p, lr=0.1))
        s.step()
        s.backward()
        yield s


REFUSED: dict[str, tuple[Callable[[Side], Any], str]] = {
    "GradScaler": (
        lambda s: torch._amp_foreach_non_finite_check_and_unscale_([s.w.grad], torch.zeros(1), torch.ones(1)),
        "bfloat16",
    ),
    "hook": (lambda s: s.w.grad.register_hook(lambda g: g), "fetch"),
    "storage": (lambda s: s.w.grad.untyped_storage(), "fetch"),
    "requires_grad_": (lambda s: s.w.grad.requires_grad_(), "second derivatives"),
    "shared": (
        lambda s: (
            setattr(s.net.second.weight, "grad", s.net.second.weight.grad)
            or setattr(s.net.head.weight, "grad", s.net.second.weight.grad)
        ),
        "clone",
    ),
    "other shape": (lambda s: assign(s.w.grad, torch.zeros(2, dtype=torch.float64)), "shape"),
    "assigned, then backward, then written": (lambda s: written_late(s), "assign the tensor again"),
}


def written_late(s: Side) -> None:
    t = torch.ones_like(s.w)
    s.w.grad = t
    s.loss().backward()
    t.mul_(2)
    s.opt.step()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(side: Side, name: str):
    attempt, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        attempt(side)


def test_a_written_array_is_loud(side: Side):
    with pytest.raises(ValueError, match="read-only"):
        side.w.grad.numpy()[0] = 1.0


def test_errors_of_plain_pytorch_are_the_same(side: Side):
    with pytest.raises(RuntimeError, match="size"):
        side.w.grad = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"view|size|shape"):
        side.w.grad.view(7)
    with pytest.raises(RuntimeError, match="size"):
        side.w.grad.add_(side.b.grad)


# ---- the objects, and what they cost


def test_a_handle_has_the_true_metadata(side: Side):
    g = side.w.grad
    assert type(g) is RemoteGradient
    assert isinstance(g, Tensor)
    assert g is side.w.grad
    assert (g.shape, g.dtype, g.device.type, g.stride(), g.requires_grad) == (
        (8, 5),
        torch.float64,
        "cpu",
        (5, 1),
        False,
    )
    assert g.detach() is g
    assert g.to("cpu") is g
    assert g.mul_(2) is g
    assert type(g.fetch()) is type(copy.deepcopy(g)) is type(pickle.loads(pickle.dumps(g))) is Tensor
    assert hash(g) == hash(side.w.grad)
    assert g in {g}


@pytest.mark.parametrize("name", REMOTE)
def test_remote_operations_bring_no_gradient_home(side: Side, name: str):
    stream = hub_of(side.w).stream
    recorded: list[Any] = []
    record = stream.record
    stream.record = lambda kind, *a, **k: recorded.append(kind) or record(kind, *a, **k)
    REMOTE[name](side)
    assert not {program.ReadGrads, program.WriteGrad} & set(recorded)


def test_stock_clipping_is_one_command(side: Side):
    stream = hub_of(side.w).stream
    side.w.grad  # asks which are None
    recorded: list[Any] = []
    record = stream.record
    stream.record = lambda kind, *a, **k: recorded.append(kind) or record(kind, *a, **k)
    utils.clip_grad_norm_(side.net.parameters(), 0.1)
    assert recorded == []
    side.opt.step()
    assert recorded[:2] == [program.Apply, program.Step]


def test_values_that_nobody_holds_are_dropped(side: Side):
    stream = hub_of(side.w).stream
    values = stream.group.workers[0].state.values
    held = side.w.grad * 2
    held.sum().item()
    assert len(values) > 0
    del held
    gc.collect()
    stream.finish()
    stream.finish()
    assert values == {}


def test_two_models_on_the_same_workers():
    first, second = Net().double(), Net().double()
    with DataParallel(first, 2, backend="local") as a, DataParallel(second, workers=a) as b:
        for model in (a, b):
            model(torch.ones(4, 5, dtype=torch.float64)).pow(2).mean().backward()
        both = [*first.parameters(), *second.parameters()]
        expected = torch.stack([p.grad.fetch().norm() for p in both if p.grad is not None]).norm()
        torch.testing.assert_close(utils.clip_grad_norm_(both, 0.1).fetch(), expected)
        clipped = torch.stack([p.grad.fetch().norm() for p in both if p.grad is not None]).norm()
        torch.testing.assert_close(clipped.item(), 0.1, rtol=1e-4, atol=0)


def test_two_models_on_different_workers():
    first, second = Net().double(), Net().double()
    with DataParallel(first, 0) as a, DataParallel(second, 0) as b:
        for model in (a, b):
            model(torch.ones(4, 5, dtype=torch.float64)).pow(2).mean().backward()
        both = [*first.parameters(), *second.parameters()]
        utils.clip_grad_norm_(both, 0.1)
        clipped = torch.stack([p.grad.fetch().norm() for p in both if p.grad is not None]).norm()
        torch.testing.assert_close(clipped.item(), 0.1, rtol=1e-4, atol=0)


def test_a_value_from_before_a_failure_is_refused():
    net = Net().double()
    with DataParallel(net, 0) as model:
        s = Side(model, net, lambda p: torch.optim.SGD(p, lr=0.1))
        for _ in range(4):
            s.step()
        s.backward()
        doubled = s.w.grad * 2
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 4, dtype=torch.float64)).sum().item()
        with pytest.raises(UnsupportedError, match="before a failure"):
            doubled.sum().item()
        s.step()


# ---- operations


@pytest.mark.parametrize(
    "function",
    [
        *(torch.Tensor.mul_, torch.Tensor.__add__, torch.Tensor.__rsub__, torch.Tensor.__pow__, torch.Tensor.norm),
        *(torch.mul, torch.norm, torch.stack, torch._foreach_norm, torch.linalg.vector_norm, torch.nn.functional.relu),
        *(
            torch.Tensor.T.__get__,
            torch.Tensor.__setitem__,
            torch.Tensor.__getitem__,
            torch.fft.fft,
            torch.special.expit,
        ),
    ],
    ids=str,
)
def test_names_of_functions(function: Any):
    name = operations.name_of(function)
    assert name is not None
    assert operations.named(pickle.loads(pickle.dumps(name))) == function


def test_a_function_of_the_user_has_no_name():
    assert operations.name_of(lambda x: x) is None


def test_numbers_out_of_sums_are_shared_before_they_change_what_is_equal():
    """A norm and what is computed from it stays as it is; the factor that scales a gradient is taken from rank 0."""
    g = torch.tensor([3.0, 4.0])
    gradient = program.Gradient(0, "g")
    steps = [
        Operation(("linalg", "vector_norm"), (gradient, 2), {}),
        Operation(("Tensor", "__rtruediv__"), (Local(0), 1.0), {}),
        Operation(("Tensor", "mul_"), (gradient, Local(1)), {}),
    ]
    shared: list[list[float]] = []

    def share(tensors: Any) -> None:
        shared.append([t.item() for t in tensors])
        for t in tensors:
            t.fill_(0.5)

    found = operations.run(steps, [1], lambda mark: g, share, torch.device("cpu"))
    assert shared == [[pytest.approx(0.2)]]
    assert g.tolist() == [1.5, 2.0]
    assert found[0].item() == 0.5


def test_elementwise_operations_share_nothing():
    g = torch.tensor([3.0, 4.0])
    gradient = program.Gradient(0, "g")
    steps = [
        Operation(("Tensor", "mul"), (gradient, 2.0), {}),
        Operation(("Tensor", "view"), (gradient, 1, 2), {}),
        Operation(("Tensor", "add_"), (gradient, Local(0)), {}),
    ]
    operations.run(steps, [0], lambda mark: g, lambda tensors: pytest.fail("shared"), torch.device("cpu"))
    assert g.tolist() == [9.0, 12.0]

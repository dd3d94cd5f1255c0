"""What users do with parameters and buffers, beside plain PyTorch: the same, or an error that says so."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchdl_ray.data_parallel import DataParallel
from torchdl_ray.errors import ClosedError, UnsupportedError
from torchdl_ray.remote_parameter import RemoteParameter, RemoteView, hub_of

from .twins import Net, Side, compare

READS: dict[str, Callable[[Side], Any]] = {
    "sum": lambda s: s.w.sum(),
    "norm": lambda s: s.w.norm(),
    "data": lambda s: s.w.data * 2,
    "detach": lambda s: s.w.detach() + 1,
    "numpy": lambda s: s.w.detach().numpy().copy(),
    "tolist": lambda s: torch.tensor(s.w.tolist()),
    "item": lambda s: s.w[0, 0].item(),
    "index": lambda s: s.w[1:3, 0],
    "iterate": lambda s: [row.sum() for row in s.w],
    "print": lambda s: str(s.w) + repr(s.w.data) + f"{s.w[0, 0]:.3f}",
    "equal": lambda s: [(s.w == s.w).all(), torch.equal(s.w, s.w.clone()), torch.allclose(s.w, s.w.detach())],
    "copy": lambda s: copy.copy(s.w),
    "deepcopy": lambda s: copy.deepcopy(s.w),
    "deepcopy of the module": lambda s: dict(copy.deepcopy(s.net).state_dict()),
    "pickle": lambda s: pickle.loads(pickle.dumps(s.w)),
    "pickle of the module": lambda s: dict(pickle.loads(pickle.dumps(s.net)).state_dict()),
    "torch.save": lambda s: saved(s.net.state_dict()),
    "state_dict": lambda s: dict(s.net.state_dict()),
    "state_dict of the optimizer": lambda s: [len(g["params"]) for g in s.opt.state_dict()["param_groups"]],
    "stack": lambda s: torch.stack([s.w.mean(), s.b.mean()]),
    "parameters_to_vector": lambda s: nn.utils.parameters_to_vector(s.net.parameters()),
    "get_total_norm": lambda s: nn.utils.get_total_norm(list(s.net.parameters())),
    "foreach": lambda s: torch._foreach_norm(list(s.net.parameters())),
    "buffers": lambda s: [s.net.norm.running_mean, s.net.norm.num_batches_tracked],
    "forward on the driver": lambda s: s.net.eval()(torch.ones(2, 5, dtype=torch.float64)),
    "functional_call": lambda s: functional(s),
    "numpy function": lambda s: torch.from_numpy(np.asarray(s.w.detach()) * 2.0),
    "shape": lambda s: [list(s.w.shape), s.w.ndim, s.w.numel(), len(s.w), s.w.is_leaf],
    "isinstance": lambda s: [
        isinstance(s.w, nn.Parameter),
        isinstance(s.w, Tensor),
        s.w in {s.w},
        s.w is s.net.first.weight,
    ],
    "zeros_like": lambda s: [torch.zeros_like(s.w), s.w.new_ones(2)],
    "view kept": lambda s: kept(s, lambda: s.w.data),
    "detached kept": lambda s: kept(s, lambda: s.w.detach()),
    "slice kept": lambda s: kept(s, lambda: s.w.detach().view(-1)[3:7]),
    "state_dict kept": lambda s: kept(s, lambda: s.net.state_dict()["first.weight"]),
    "array kept": lambda s: kept(s, lambda: s.w.detach().numpy()),
    "clone kept": lambda s: kept(s, lambda: s.w.clone()),
    "buffer kept": lambda s: kept(s, lambda: s.net.norm.running_mean),
    "cosine": lambda s: torch.nn.functional.cosine_similarity(s.w.flatten(), s.w.detach().flatten(), dim=0),
    "histogram": lambda s: torch.histc(s.w.detach(), 5),
    "max": lambda s: [s.w.max(), s.w.max(dim=1).indices, s.w.abs().topk(2).values],
    "matmul": lambda s: s.w @ s.w.T,
    "spectral": lambda s: torch.linalg.matrix_norm(s.w, 2),
}


def saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(type(v) is Tensor for v in loaded.values())
    return dict(loaded)


def functional(s: Side) -> Any:
    doubled = {n: p * 2 for n, p in s.net.named_parameters()}
    s.net.eval()
    found = torch.func.functional_call(s.net, doubled, (torch.ones(2, 5, dtype=torch.float64),))
    s.net.train()
    return found


def kept(s: Side, take: Callable[[], Any]) -> Any:
    held = take()
    s.step()
    s.step()
    return held + 0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", READS)
def test_reading(name: str, workers: int):
    def script(s: Side) -> Any:
        s.step()
        found = READS[name](s)
        s.net.train()
        s.step()
        return [found, READS[name](s)]

    compare(script, workers)


def no_grad(write: Callable[[Side], Any]) -> Callable[[Side], Any]:
    def written(s: Side) -> Any:
        with torch.no_grad():
            return write(s)

    return written


def assign(target: Any, value: Any) -> None:
    target.data = value


def put(target: Any, key: Any, value: Any) -> None:
    target[key] = value


WRITES: dict[str, Callable[[Side], Any]] = {
    "mul_": no_grad(lambda s: s.w.mul_(0.5)),
    "augmented": no_grad(lambda s: s.w.__imul__(0.5)),
    "copy_": no_grad(lambda s: s.w.copy_(torch.ones_like(s.w))),
    "data.clamp_": lambda s: s.w.data.clamp_(-0.1, 0.1),
    "data slice": lambda s: s.w.data[0].zero_(),
    "setitem": no_grad(lambda s: put(s.w, 0, 1.0)),
    "setitem by mask": no_grad(lambda s: put(s.w, s.w < 0, 0.0)),
    "detach().mul_": lambda s: s.w.detach().mul_(0.5),
    "view kept and written": lambda s: written_through(s, s.w.data),
    "slice kept and written": lambda s: written_through(s, s.w.detach().view(-1)[2:5]),
    "numpy": lambda s: put(s.w.detach().numpy(), (0, 0), 7.0),
    "numpy of data": lambda s: put(s.w.data.numpy()[1], 0, 7.0),
    "array kept and written": lambda s: numpy_kept(s),
    "storage": lambda s: put(s.w.untyped_storage(), 3, 17),
    "from numpy by data": lambda s: assign(s.w, torch.from_numpy(np.ones((8, 5)))),
    "data = tensor": lambda s: assign(s.w, torch.full((8, 5), 0.25, dtype=torch.float64)),
    "data = tensor kept": lambda s: assigned_and_written(s),
    "init": lambda s: nn.init.constant_(s.w, 0.3),
    "random init": lambda s: [nn.init.xavier_uniform_(s.w), nn.init.normal_(s.b), nn.init.orthogonal_(s.unused)],
    "reset_parameters": lambda s: s.net.second.reset_parameters(),
    "apply": lambda s: s.net.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None) and None,
    "ema": no_grad(lambda s: [p.mul_(0.9).add_(torch.ones_like(p), alpha=0.1) for p in s.net.parameters()] and None),
    "foreach": no_grad(lambda s: torch._foreach_mul_(list(s.net.parameters()), 0.5)),
    "out": no_grad(lambda s: torch.neg(s.w, out=s.w).sum()),
    "by hand": no_grad(lambda s: [p.sub_(0.01 * p) for p in s.net.parameters()] and None),
    "weight decay by hand": no_grad(lambda s: [p.add_(p, alpha=-0.01) for p in s.net.parameters()] and None),
    "vector_to_parameters": lambda s: nn.utils.vector_to_parameters(
        torch.linspace(-1, 1, sum(p.numel() for p in s.net.parameters()), dtype=torch.float64), s.net.parameters()
    ),
    "load_state_dict": lambda s: s.net.load_state_dict({k: v * 0.5 for k, v in s.net.state_dict().items()}) and None,
    "load_state_dict of one": lambda s: (
        s.net.second.load_state_dict({"weight": torch.ones(3, 8), "bias": torch.ones(3)}) and None
    ),
    "buffer": lambda s: s.net.shift.add_(1.0),
    "buffer data": lambda s: s.net.shift.data.fill_(2.0),
    "buffer replaced": lambda s: setattr(s.net, "shift", torch.full((3,), 2.0, dtype=torch.float64)),
    "buffer replaced by another shape": lambda s: setattr(s.net, "shift", torch.full((1,), 2.0, dtype=torch.float64)),
    "buffer registered again": lambda s: s.net.register_buffer("shift", torch.ones(3, dtype=torch.float64)),
    "reset_running_stats": lambda s: s.net.norm.reset_running_stats(),
    "training forward on the driver": lambda s: s.net(torch.randn(4, 5, dtype=torch.float64)).sum().item(),
    "swap rows": no_grad(lambda s: s.w.copy_(s.w[torch.randperm(8)])),
    "prune": no_grad(lambda s: s.w.masked_fill_(s.w.abs() < 0.2, 0.0)),
    "renorm": no_grad(lambda s: s.w.renorm_(2, 0, 0.5)),
    "normalise": lambda s: assign(s.w, torch.nn.functional.normalize(s.w.data, dim=1)),
    "module.double": lambda s: s.net.double() and None,
    "module.to": lambda s: s.net.to("cpu") and None,
    "requires_grad_": lambda s: s.w.requires_grad_(False),
    "freeze": lambda s: s.net.first.requires_grad_(False) and None,
    "requires_grad": lambda s: setattr(s.b, "requires_grad", False),
    "attribute": lambda s: setattr(s.net, "gain", 0.5),
    "attribute of a submodule": lambda s: setattr(s.net.norm, "momentum", 0.5),
    "attribute from inside": lambda s: s.net.settings.__setitem__("use_head", True),
    "eps": lambda s: setattr(s.net.norm, "eps", 0.1),
    "mode of one": lambda s: s.net.norm.eval() and None,
    "stochastic": lambda s: setattr(s.net.drop, "p", 1.0),
}


def written_through(s: Side, view: Tensor) -> None:
    s.step()
    view.mul_(0.5)
    s.step()
    view.add_(0.125)


def numpy_kept(s: Side) -> None:
    array = s.w.detach().numpy()
    array[0, 0] = 3.0
    s.step()
    array[1, 1] = array[0, 0] * 2
    s.step()
    array *= 0.5


def assigned_and_written(s: Side) -> None:
    t = torch.full((8, 5), 0.25, dtype=torch.float64)
    s.w.data = t
    t[0] = 0.5


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", WRITES)
def test_writing(name: str, workers: int):
    def script(s: Side) -> Any:
        s.step()
        WRITES[name](s)
        first = s.forward()
        s.step()
        s.step()
        return [first, s.forward()]

    compare(script, workers)


@pytest.mark.parametrize("name", ["mul_", "data.clamp_", "numpy", "buffer", "data = tensor", "freeze", "attribute"])
def test_writing_between_backward_and_step(name: str):
    def script(s: Side) -> Any:
        s.step()
        s.backward()
        WRITES[name](s)
        s.opt.step()
        s.step()
        return s.forward()

    compare(script, 2)


def penalty(s: Side) -> Any:
    s.opt.zero_grad()
    (s.loss() + 0.1 * sum((p**2).sum() for p in s.net.parameters())).backward()
    s.opt.step()


def penalty_apart(s: Side) -> Any:
    s.backward()
    (0.1 * s.w.norm()).backward()
    grad = s.w.grad + 0
    s.opt.step()
    return grad


def penalty_alone(s: Side) -> Any:
    s.opt.zero_grad()
    (s.unused**2).sum().backward()
    found = [s.w.grad is None, s.unused.grad + 0]
    s.opt.step()
    return found


def penalty_zeroed(s: Side) -> Any:
    (s.w**2).sum().backward()
    s.opt.zero_grad()
    s.loss().backward()
    s.opt.step()


def averaged(s: Side) -> Any:
    ema = torch.optim.swa_utils.AveragedModel(s.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        s.step()
        ema.update_parameters(s.net)
    return dict(ema.module.state_dict())


def ema_by_hand(s: Side) -> Any:
    shadow = {n: p.clone().detach() for n, p in s.net.named_parameters()}
    for _ in range(3):
        s.step()
        with torch.no_grad():
            for n, p in s.net.named_parameters():
                shadow[n].mul_(0.9).add_(p, alpha=0.1)
    backup = {n: p.data for n, p in s.net.named_parameters()}
    for n, p in s.net.named_parameters():
        p.data = shadow[n]
    found = s.forward()
    for n, p in s.net.named_parameters():
        p.data = backup[n]
    s.step()
    return found


def frozen_for_a_while(s: Side) -> Any:
    for k in range(6):
        s.net.first.requires_grad_(k // 2 % 2 == 1)
        s.step()
    return s.w


def early_stopping(s: Side) -> Any:
    best = copy.deepcopy(s.net.state_dict())
    s.step()
    s.net.load_state_dict(best)
    return s.forward()


def projected(s: Side) -> Any:
    for _ in range(3):
        s.step()
        for p in s.net.parameters():
            p.data.clamp_(-0.2, 0.2)


def lookahead(s: Side) -> Any:
    slow = [p.detach().clone() for p in s.net.parameters()]
    for k in range(4):
        s.step()
        if k % 2:
            with torch.no_grad():
                for p, q in zip(s.net.parameters(), slow, strict=True):
                    q.add_(p - q, alpha=0.5)
                    p.copy_(q)


def perturbed(s: Side) -> Any:
    """Sharpness-aware: climb, take the gradient there, come back, step."""
    s.backward()
    with torch.no_grad():
        climbs = [p.grad * 0.1 if p.grad is not None else None for p in s.net.parameters()]
        for p, e in zip(s.net.parameters(), climbs, strict=True):
            if e is not None:
                p.add_(e)
    s.backward()
    with torch.no_grad():
        for p, e in zip(s.net.parameters(), climbs, strict=True):
            if e is not None:
                p.sub_(e)
    s.opt.step()


def plain_descent(s: Side) -> Any:
    for _ in range(3):
        s.backward()
        with torch.no_grad():
            for p in s.net.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad


LOOPS = [
    *(penalty, penalty_apart, penalty_alone, penalty_zeroed, averaged, ema_by_hand, frozen_for_a_while, early_stopping),
    *(projected, lookahead, perturbed, plain_descent),
]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_loops(loop: Callable[[Side], Any], workers: int):
    def script(s: Side) -> Any:
        s.step()
        found = loop(s)
        s.step()
        return [found if found is not None else 0, s.forward()]

    compare(script, workers)


# ---- what raises


REFUSED: dict[str, tuple[Callable[[Side], Any], str]] = {
    "hook": (lambda s: s.w.register_hook(lambda g: g), r"p\.grad"),
    "post hook": (lambda s: s.w.register_post_accumulate_grad_hook(lambda p: None), r"p\.grad"),
    "autograd.grad": (lambda s: torch.autograd.grad(s.loss(), list(s.net.parameters())), "model.run"),
    "backward with inputs": (lambda s: s.loss().backward(inputs=[s.w]), "model.run"),
    "backward of a penalty with inputs": (lambda s: (s.w**2).sum().backward(inputs=[s.w]), "model.run"),
    "backward with inputs on the driver": (
        lambda s: torch.autograd.backward((s.loss() + 0).exp(), inputs=list(s.net.parameters())),
        "model.run",
    ),
    "dlpack": (lambda s: np.from_dlpack(s.w.detach()), "clone"),
    "other dtype": (lambda s: s.net.half(), "anew"),
    "other shape": (lambda s: assign(s.w, torch.zeros(2, dtype=torch.float64)), "anew"),
    "shared memory": (lambda s: assign(s.net.second.weight, s.net.head.weight.data), "anew"),
    "tied": (
        lambda s: setattr(s.net.second, "weight", s.net.head.weight) or s.forward(),
        "'second.weight' was replaced",
    ),
    "new parameter object": (
        lambda s: setattr(s.net.second, "bias", nn.Parameter(torch.zeros(3))) or s.forward(),
        "anew",
    ),
    "new submodule": (lambda s: s.net.add_module("more", nn.Linear(2, 2)) or s.forward(), "'more' was added"),
    "submodule replaced": (lambda s: setattr(s.net, "second", nn.Linear(8, 3)) or s.forward(), "'second' was replaced"),
    "submodule removed": (lambda s: delattr(s.net, "second") or s.forward(), "'second' was removed"),
    "new buffer": (lambda s: s.net.register_buffer("more", torch.zeros(1)) or s.forward(), "'more' was added"),
    "forward hook": (
        lambda s: s.net.first.register_forward_hook(lambda *a: None) and s.forward(),
        "hook of module 'first'",
    ),
    "method replaced": (lambda s: setattr(s.net, "forward", lambda x: x) or s.forward(), "callable"),
    "spectral norm afterwards": (
        lambda s: nn.utils.parametrizations.spectral_norm(s.net.second) and s.forward(),
        "anew",
    ),
    "GradScaler": (
        lambda s: torch._amp_foreach_non_finite_check_and_unscale_([s.graded().grad], torch.zeros(1), torch.ones(1)),
        "bf16",
    ),
    "array written after a step": (lambda s: stale_array(s), "numpy array"),
}


def stale_array(s: Side) -> None:
    array = s.w.detach().numpy()
    s.step()
    hub = hub_of(s.w)
    hub._stale.add("first.weight")  # as after a failure, when nobody could bring it up to date
    array[0, 0] = 1.0
    s.forward()


@pytest.fixture
def side():
    torch.manual_seed(0)
    net = Net().double()
    with DataParallel(net, 0) as model:
        s = Side(model, net, lambda p: torch.optim.SGD(p, lr=0.1))
        s.step()
        s.graded = lambda: s.backward() or s.w
        yield s


@pytest.mark.parametrize("name", REFUSED)
def test_refused(side: Side, name: str):
    attempt, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        attempt(side)


class Kind(nn.Parameter):
    pass


def lazily() -> nn.Module:
    return nn.LazyLinear(3)


def subclassed() -> nn.Module:
    net = nn.Linear(2, 2)
    net.weight = Kind(torch.zeros(2, 2))
    return net


def hooked() -> nn.Module:
    net = nn.Linear(2, 2)
    net.weight.register_hook(lambda g: g)
    return net


@pytest.mark.parametrize(("make", "message"), [(lazily, "lazy"), (subclassed, "Kind"), (hooked, "gradient hook")])
def test_refused_at_wrapping(make: Callable[[], nn.Module], message: str):
    net = make()
    with pytest.raises(UnsupportedError, match=message):
        DataParallel(net, 0)
    assert not any(isinstance(p, RemoteParameter) for p in net.parameters())


# ---- the objects, and what they cost


def test_copies_are_plain(side: Side):
    assert type(side.w) is RemoteParameter
    assert type(side.w.data) is RemoteView
    for plain in (copy.deepcopy(side.w), copy.copy(side.w), pickle.loads(pickle.dumps(side.w))):
        assert type(plain) is nn.Parameter
        assert plain.requires_grad
    assert type(side.w.clone()) is Tensor
    assert type(copy.deepcopy(side.w.data)) is Tensor
    assert type(pickle.loads(pickle.dumps(side.net.shift))) is Tensor
    assert all(type(p) is nn.Parameter for p in copy.deepcopy(side.net).parameters())


def test_metadata_sends_nothing(side: Side):
    stream = hub_of(side.w).stream
    before = stream.num_messages
    for p in side.net.parameters():
        p.shape, p.dtype, p.device, p.requires_grad, p.is_leaf, p.numel(), p.stride(), hash(p), p.grad_fn, p.ndim
        torch.zeros_like(p), p.size(0), p.is_floating_point(), p.data_ptr()
    list(side.net.named_parameters())
    assert stream.num_messages == before


def test_reading_costs_two_messages_for_all_parameters(side: Side):
    side.step()
    stream = hub_of(side.w).stream
    stream.finish()
    before = stream.num_messages
    [p.sum().item() for p in side.net.parameters()]
    [p.sum().item() for p in side.net.parameters()]
    assert stream.num_messages - before == 2


def test_nothing_changed_sends_no_commands(side: Side):
    hub = hub_of(side.w)
    hub.stream.finish()
    for _ in range(3):
        hub.before_call()
        hub.before_backward()
        hub.before_step()
    assert not hub.stream._waiting()


def test_a_released_module_is_plain_and_up_to_date():
    net = Net().double()
    model = DataParallel(net, 0)
    s = Side(model, net, lambda p: torch.optim.SGD(p, lr=0.1))
    s.step()
    s.backward()
    weight, grad = s.w.clone(), s.w.grad.fetch()
    view = s.w.data
    model.close()
    assert type(net.first.weight) is nn.Parameter
    assert type(net.shift) is Tensor
    assert hub_of(net.first.weight) is None
    torch.testing.assert_close(net.first.weight, weight)
    torch.testing.assert_close(net.first.weight.grad, grad)
    assert net.head.weight.grad is None
    view.zero_()
    assert net.first.weight.sum() == 0
    net(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    assert type(net.first.weight.grad) is Tensor


def test_wrapping_again_takes_over():
    net = Net().double()
    first = DataParallel(net, 0)
    Side(first, net, lambda p: torch.optim.SGD(p, lr=0.1)).step()
    weight = net.first.weight.clone()
    second = DataParallel(net, 0)
    torch.testing.assert_close(net.first.weight.detach(), weight.detach())
    with pytest.raises(ClosedError, match="wrapped again"):
        first(torch.ones(2, 5, dtype=torch.float64))
    first.close()
    second(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    assert net.first.weight.grad is not None
    second.close()


def test_gradients_from_before_the_wrapping_count():
    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = nn.Linear(3, 1).double()
        net(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    net, opt = build()
    plain, plain_opt = build()
    with DataParallel(net, 2, backend="local") as model:
        model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
        opt.step()
    plain(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    plain_opt.step()
    torch.testing.assert_close(dict(net.state_dict()), dict(plain.state_dict()))


def test_tied_parameters_are_one():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    net[1].weight = net[0].weight
    with DataParallel(net, 0) as model:
        assert list(hub_of(net[0].weight).parameters) == ["0.weight", "0.bias", "1.bias"]
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        assert net[1].weight is net[0].weight
        assert net[1].weight.grad is net[0].weight.grad


def test_a_spectral_norm_works():
    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 1)).double()
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    (net, opt), (plain, plain_opt) = build(), build()
    x = torch.randn(6, 4, dtype=torch.float64)
    with DataParallel(net, 1, backend="local") as model:
        for call, o in ((model, opt), (plain, plain_opt)):
            for _ in range(3):
                o.zero_grad()
                call(x).pow(2).mean().backward()
                o.step()
        net.eval()
        plain.eval()
        torch.testing.assert_close(net[0].weight, plain[0].weight, rtol=0, atol=0)


def test_dropped_commands_leave_the_truth():
    """After an exception on the workers the driver shows what they have, and says again what they may have missed."""
    net = Net().double()
    with DataParallel(net, 0) as model:
        s = Side(model, net, lambda p: torch.optim.SGD(p, lr=0.1))
        for _ in range(4):
            s.step()
        before = s.w.clone()
        model(torch.ones(2, 4, dtype=torch.float64))
        net.gain = 0.5
        net.norm.eval()
        with torch.no_grad():
            s.w.mul_(2.0)
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 5, dtype=torch.float64)).sum().item()
        torch.testing.assert_close(s.w.detach(), before.detach())
        assert model.run(lambda m: (m.gain, m.norm.training)) == [(0.5, False)]
        s.step()


def test_nothing_keeps_a_dropped_model_alive():
    import weakref

    net = Net().double()
    model = DataParallel(net, 0)
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    assert type(net.first.weight) is nn.Parameter

"""Stock optimizers over remote parameters against plain PyTorch: weights and state, step by step."""

from __future__ import annotations

import collections
import copy
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import _global_optimizer_pre_hooks

from torchdl_ray import optim
from torchdl_ray.data_parallel import DataParallel
from torchdl_ray.errors import UnsupportedError

from .optimizer_pairs import Make, Pair, assert_equal, batch, build_net


@pytest.fixture
def pairs() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(*args: Any) -> Pair:
        made.append(Pair(*args))
        return made[-1]

    yield make
    for pair in made:
        pair.model.close()


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def matrices(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in params if p.ndim == 2]


STOCK: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "sgd_nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd_fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "adam_foreach": lambda ps: torch.optim.Adam(ps, lr=1e-2, foreach=True),
    "adam_fused": lambda ps: torch.optim.Adam(ps, lr=1e-2, fused=True),
    "adam_tensor_lr": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(1e-2)),
    "adam_maximize": lambda ps: torch.optim.Adam(ps, lr=1e-2, maximize=True),
    "adamw_amsgrad": lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-2),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=1e-2),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1.0),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.9, centered=True),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-2),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "muon": lambda ps: torch.optim.Muon(matrices(ps), lr=1e-2),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_optimizers_equal_plain_pytorch(name: str, pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, STOCK[name])
    for i in range(20):
        pair.step(i)
    pair.check()


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw_amsgrad", "adam_fused", "nadam", "adafactor", "muon", "asgd"])
def test_stock_optimizers_on_two_workers(name: str, pairs: Callable[..., Pair]) -> None:
    pair = pairs(2, STOCK[name])
    for i in range(20):
        pair.step(i)
    # Muon orthogonalises in bfloat16, so a last bit of the gradient moves the update by a bfloat16 rounding.
    if name != "muon":
        pair.check(exact=False)
    hashes = pair.model.check_sync()
    assert len(set(hashes)) == 1


# ---- schedulers

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 10, 0.1),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=30),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 30),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5]
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=4),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers(name: str, tensor_lr: bool, pairs: Callable[..., Pair]) -> None:
    if tensor_lr and name in ("cyclic", "one_cycle"):
        pytest.skip("plain PyTorch does not take a tensor here with cycled momentum")
    lr: Any = torch.tensor(0.05) if tensor_lr else 0.05
    pair = pairs(0, lambda ps: torch.optim.SGD(ps, lr=copy.deepcopy(lr), momentum=0.9))
    schedules = [SCHEDULES[name](o) for o in pair.optimizers]
    for i in range(25):
        pair.step(i)
        for schedule in schedules:
            schedule.step()
        assert_equal(schedules[0].get_last_lr(), schedules[1].get_last_lr())
    pair.check()


def test_steplr_decays_once_with_several_workers(pairs: Callable[..., Pair]) -> None:
    pair = pairs(2, sgd)
    schedule = lr_scheduler.StepLR(pair.optimizers[0], 10, 0.1)
    for i in range(10):
        pair.step(i)
        schedule.step()
    assert pair.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)
    seen = pair.model.run(lambda module: None)
    assert seen == [None, None]


def test_reduce_on_plateau(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, sgd)
    schedules = [lr_scheduler.ReduceLROnPlateau(o, patience=1) for o in pair.optimizers]
    for i in range(8):
        pair.step(i)
        for schedule in schedules:
            schedule.step(1.0)
    assert pair.optimizers[0].param_groups[0]["lr"] < 0.1
    pair.check()


# ---- groups


def test_hyperparameters_set_by_hand_take_effect_at_the_next_step(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: torch.optim.Adam(ps, lr=torch.tensor(1e-2)))
    for i in range(8):
        for o in pair.optimizers:
            if i == 2:
                o.param_groups[0]["lr"].mul_(0.1)  # in place
            if i == 4:
                o.param_groups[0]["weight_decay"] = 0.1
            if i == 6:
                o.param_groups[0]["betas"] = (0.5, 0.9)
        pair.step(i)
    pair.check()


def test_groups_come_go_and_move(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: torch.optim.SGD([{"params": ps[:2], "lr": 0.5}], lr=0.1, momentum=0.9))
    for i in range(10):
        for o, (_, net) in zip(pair.optimizers, pair.sides, strict=True):
            ps = list(net.parameters())
            if i == 2:
                o.add_param_group({"params": ps[2:3], "momentum": 0.5})
            if i == 4:
                o.add_param_group({"params": ps[3:]})
            if i == 6:
                o.param_groups.reverse()
            if i == 7:
                del o.param_groups[1]
            if i == 8:
                o.param_groups[0]["params"].append(ps[2])
                o.param_groups[0]["note"] = "kept"
        pair.step(i)
    pair.check()


def test_freezing_and_unfreezing(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1))
    for i in range(6):
        for _, net in pair.sides:
            for p in list(net.parameters())[:2]:
                p.requires_grad_(i not in (2, 3))
        pair.step(i)
    pair.check()


# ---- when and how often


def test_steps_without_gradients_and_twice_in_a_row(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1))
    for o in pair.optimizers:
        assert o.step() is None
    pair.check()
    for i in range(3):
        pair.step(i)
        for o in pair.optimizers:
            o.step()
    pair.check()


def test_accumulation_over_two_batches(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, adamw)
    for i in range(5):
        for (call, _), o in zip(pair.sides, pair.optimizers, strict=True):
            x, y = batch(i)
            F.cross_entropy(call(x), y).backward()
            if i % 2 or i == 4:
                o.step()
                o.zero_grad()
    pair.check()


def test_a_step_sends_one_message_and_waits_for_nothing(pairs: Callable[..., Pair]) -> None:
    pair = pairs(2, adamw)
    for i in range(5):
        pair.step(i)
    model = pair.model
    before = model._stream.num_messages
    for i in range(5):
        model.zero_grad()
        x, y = batch(i)
        F.cross_entropy(model(x), y)
        pair.optimizers[0].step()
    assert model._stream.num_messages - before <= 2 * 2 * 5


def test_two_optimizers_over_one_model_and_one_parameter_in_both(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0)
    for _, net in pair.sides:
        ps = list(net.parameters())
        pair.optimizers.append(torch.optim.SGD(ps[:3], lr=0.1, momentum=0.9))
    more = [torch.optim.Adam(list(net.parameters())[2:], lr=1e-2) for _, net in pair.sides]
    for i in range(6):
        pair.step(i)
        for o in more:
            o.step()
    pair.check()
    assert_equal(more[0].state_dict(), more[1].state_dict())


def test_one_optimizer_over_two_models_and_parameters_of_the_driver() -> None:
    extra = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    nets = [[build_net(0), build_net(1)], [build_net(0), build_net(1)]]
    first = DataParallel(nets[0][0], 0)
    second = DataParallel(nets[0][1], 0)
    calls = [(first, second), tuple(nets[1])]
    optimizers = []
    for k in range(2):
        a, b = (list(n.parameters()) for n in nets[k])
        optimizers.append(torch.optim.Adam([{"params": [*a, extra[k]]}, {"params": b, "lr": 1e-3}], lr=1e-2))
    for i in range(5):
        x, y = batch(i)
        for k in range(2):
            optimizers[k].zero_grad()
            (F.cross_entropy(calls[k][0](x), y) + F.cross_entropy(calls[k][1](x), y)).backward()
            (extra[k] ** 2).sum().backward()
            optimizers[k].step()
    assert_equal(first.state_dict(), nets[1][0].state_dict())
    assert_equal(second.state_dict(), nets[1][1].state_dict())
    assert torch.equal(extra[0], extra[1])
    assert_equal(optimizers[0].state_dict(), optimizers[1].state_dict())
    first.close()
    second.close()


def test_a_gan_on_shared_workers() -> None:
    nets = [[build_net(0), build_net(1)], [build_net(0), build_net(1)]]
    first = DataParallel(nets[0][0], 2, backend="local")
    second = DataParallel(nets[0][1], workers=first)
    calls = [(first, second), tuple(nets[1])]
    both = [torch.optim.Adam([*a.parameters(), *b.parameters()], lr=1e-2) for a, b in nets]
    one = [torch.optim.SGD(b.parameters(), lr=1e-2, momentum=0.9) for _, b in nets]
    for i in range(4):
        x, y = batch(i)
        for k in range(2):
            both[k].zero_grad()
            (F.cross_entropy(calls[k][0](x), y) + F.cross_entropy(calls[k][1](x), y)).backward()
            both[k].step()
            one[k].step()
    assert_equal(first.state_dict(), nets[1][0].state_dict(), exact=False)
    assert_equal(second.state_dict(), nets[1][1].state_dict(), exact=False)
    assert_equal(both[0].state_dict(), both[1].state_dict(), exact=False)
    assert_equal(one[0].state_dict(), one[1].state_dict(), exact=False)
    first.check_sync()
    second.close()
    first.close()


def test_a_model_that_is_wrapped_later() -> None:
    nets = [[build_net(0), build_net(1)], [build_net(0), build_net(1)]]
    optimizers = [torch.optim.Adam([*a.parameters(), *b.parameters()], lr=1e-2) for a, b in nets]
    calls: list[list[Any]] = [[DataParallel(nets[0][0], 0), nets[0][1]], list(nets[1])]
    for i in range(6):
        if i == 3:
            calls[0][1] = DataParallel(nets[0][1], 0)
        x, y = batch(i)
        for k in range(2):
            optimizers[k].zero_grad()
            (F.cross_entropy(calls[k][0](x), y) + F.cross_entropy(calls[k][1](x), y)).backward()
            optimizers[k].step()
    for k in range(2):
        assert_equal(calls[0][k].state_dict(), nets[1][k].state_dict())
    assert_equal(optimizers[0].state_dict(), optimizers[1].state_dict())
    for model in calls[0]:
        model.close()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad(foreach: bool, set_to_none: bool, pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, foreach=foreach))
    for i in range(3):
        pair.step(i)
        for o in pair.optimizers:
            o.zero_grad(set_to_none=set_to_none)
            o.step()
    pair.check()


# ---- the state


def test_state_comes_home_when_looked_at(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, adamw)
    for i in range(3):
        pair.step(i)
    remote, plain = pair.optimizers
    p, q = next(iter(pair.net.parameters())), next(iter(pair.plain.parameters()))
    assert isinstance(remote.state, collections.defaultdict)
    assert torch.equal(remote.state[p]["exp_avg"], plain.state[q]["exp_avg"])
    assert len(remote.state) == len(plain.state) == 4
    assert p in remote.state
    assert [set(v) for v in remote.state.values()] == [set(v) for v in plain.state.values()]
    pair.step(3)
    looks: list[Callable[[Any], Any]] = [len, dict, bool, lambda s: list(s.items()), copy.copy, copy.deepcopy]
    looks += [lambda s: pickle.loads(pickle.dumps(s)), lambda s: {**s}, list, repr, lambda s: s | {}]
    looks += [lambda s: s.get(p), lambda s: {} | s, lambda s: s.copy(), lambda s: s == dict(s)]
    for look in looks:
        assert look(remote.state)
        pair.step(4)
    pair.check()


def test_changed_state_goes_out(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, sgd)
    for i in range(10):
        pair.step(i)
        for o in pair.optimizers:
            p = o.param_groups[0]["params"][1]
            if i == 2:
                o.state[p]["momentum_buffer"].mul_(0.5)
            if i == 4:
                o.state[p]["momentum_buffer"].data[0] = 7.0
            if i == 5:
                del o.state[p]
            if i == 6:
                o.state.clear()
            if i == 8:
                o.state = collections.defaultdict(dict)
    pair.check()


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("after", [0, 2])
def test_checkpoints_both_ways(before: int, after: int, pairs: Callable[..., Pair]) -> None:
    source = pairs(0, adamw)
    for i in range(4):
        source.step(i)
    target = pairs(0, adamw)
    for i in range(before):
        target.step(i)
    # the remote one takes the plain one's checkpoint and the other way round
    for k in range(2):
        file = io.BytesIO()
        torch.save(source.optimizers[1 - k].state_dict(), file)
        file.seek(0)
        target.optimizers[k].load_state_dict(torch.load(file))
    for i in range(after):
        target.step(10 + i)
    target.check()


def test_copies_and_pickles_are_plain(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, adamw)
    for i in range(3):
        pair.step(i)
    clones = [copy.deepcopy(o) for o in pair.optimizers]
    assert not optim.is_remote(clones[0])
    assert_equal(clones[0].state_dict(), clones[1].state_dict())
    loaded = pickle.loads(pickle.dumps(pair.optimizers[0]))
    assert_equal(loaded.state_dict(), pair.optimizers[1].state_dict())
    for clone in clones:
        for p in clone.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        clone.step()
    assert_equal(clones[0].state_dict(), clones[1].state_dict())
    pair.check()


def test_an_optimizer_made_and_stepped_before_the_wrapping() -> None:
    nets = [build_net(), build_net()]
    optimizers = [adamw(list(n.parameters())) for n in nets]
    for net, o in zip(nets, optimizers, strict=True):
        x, y = batch(0)
        F.cross_entropy(net(x), y).backward()
        o.step()
        o.zero_grad()
    model = DataParallel(nets[0], 0)
    for i in range(1, 4):
        for call, o in zip((model, nets[1]), optimizers, strict=True):
            o.zero_grad()
            x, y = batch(i)
            F.cross_entropy(call(x), y).backward()
            o.step()
    assert_equal(model.state_dict(), nets[1].state_dict())
    assert_equal(optimizers[0].state_dict(), optimizers[1].state_dict())
    model.close()


def test_release_leaves_an_ordinary_optimizer(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, adamw)
    for i in range(3):
        pair.step(i)
    optim.release_optimizers(pair.model._parameters_hub)
    pair.model.close()
    pair.sides[0] = (pair.net, pair.net)
    assert type(pair.optimizers[0].state) is collections.defaultdict
    for i in range(3, 6):
        pair.step(i)
    assert_equal(pair.net.state_dict(), pair.plain.state_dict())
    assert_equal(*[o.state_dict() for o in pair.optimizers])


def test_a_dropped_optimizer_is_dropped_on_the_workers(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, adamw)
    pair.step(0)
    worker = pair.model._stream.group.workers[0]
    assert len(worker.state.optimizers) == 1
    gone = weakref.ref(pair.optimizers[0])
    pair.optimizers.clear()
    assert gone() is None
    pair.model.flush()
    assert not worker.state.optimizers


# ---- hooks


def test_hooks_run_on_the_driver_once_per_step(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, adamw)
    logs: list[list[str]] = [[], []]
    for o, log in zip(pair.optimizers, logs, strict=True):
        o.register_step_post_hook(lambda o, a, k, log=log: log.append("post"))
        o.register_step_pre_hook(lambda o, a, k, log=log: log.append("pre"))
        o.register_state_dict_pre_hook(lambda o, log=log: log.append("state"))
        o.register_state_dict_post_hook(lambda o, d, log=log: {**d, "extra": 1})
        o.register_load_state_dict_pre_hook(lambda o, d, log=log: log.append("load"))
    for i in range(2):
        pair.step(i)
        for o, log in zip(pair.optimizers, logs, strict=True):  # registered after ours
            o.register_step_pre_hook(lambda o, a, k, log=log, i=i: log.append(f"late {i}"))
    states = [o.state_dict() for o in pair.optimizers]
    assert states[0]["extra"] == 1
    for o, state in zip(pair.optimizers, states, strict=True):
        o.load_state_dict(state)
    assert logs[0] == logs[1]
    pair.check()


def test_a_pre_hook_that_changes_hyperparameters(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, sgd)
    pair.step(0)
    for o in pair.optimizers:
        o.register_step_pre_hook(lambda o, a, k: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.9))
    for i in range(1, 5):
        pair.step(i)
    pair.check()


def test_install_is_idempotent() -> None:
    hooks = _global_optimizer_pre_hooks
    before = dict(hooks)
    optim.install()
    assert dict(hooks) == before


# ---- closures


def losses(pair: Pair, i: int) -> list[float]:
    found = []
    for (call, _), o in zip(pair.sides, pair.optimizers, strict=True):

        def closure(call: Any = call, o: torch.optim.Optimizer = o) -> Tensor:
            o.zero_grad()
            x, y = batch(i)
            loss = F.cross_entropy(call(x), y)
            loss.backward()
            return loss

        found.append(o.step(closure).item())
    return found


@pytest.mark.filterwarnings("error")
def test_closures_of_stock_steps_stay_remote(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, adamw)
    for i in range(4):
        ours, plain = losses(pair, i)
        assert ours == plain
    pair.check()


def test_lbfgs_runs_on_the_driver_and_says_so_once(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, lambda ps: torch.optim.LBFGS(ps, lr=0.5, max_iter=4, history_size=3))
    with pytest.warns(UserWarning, match="LBFGS.step runs on the driver") as caught:
        found = [losses(pair, i) for i in range(4)]
    assert all(ours == plain for ours, plain in found)
    assert len([w for w in caught if "runs on the driver" in str(w.message)]) == 1
    assert caught[0].filename == __file__
    pair.check()


def test_a_grad_scaler_is_refused(pairs: Callable[..., Pair]) -> None:
    pair = pairs(0, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    x, y = batch(0)
    F.cross_entropy(pair.model(x), y).backward()
    scaler.scale(torch.ones(()))
    state = scaler._per_optimizer_states[id(pair.optimizers[0])]
    state.update(stage=torch.amp.grad_scaler.OptState.UNSCALED, found_inf_per_device={"cpu": torch.zeros(())})
    with pytest.raises(UnsupportedError, match="bfloat16"):
        scaler.step(pair.optimizers[0])
    pair.optimizers[0].zero_grad()
    pair.step(1)
    pair.check()

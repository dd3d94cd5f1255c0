"""The worker: messages by number, what a plan fuses and arms, positions, failures on one rank and on all."""

import contextlib
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchdl_ray import DataParallel
from torchdl_ray.errors import CollectiveError
from torchdl_ray.local_group import LocalGroup
from torchdl_ray.program import (
    AddModel,
    Backward,
    ClipGradNorm,
    Drop,
    Fetch,
    Forward,
    Link,
    Message,
    Reduce,
    Run,
    Seed,
    Step,
    ZeroGrad,
)  # fmt: skip
from torchdl_ray.remote_exception import unpack
from torchdl_ray.shipping import ship
from torchdl_ray.tree import to_wire
from torchdl_ray.worker import Worker, plan


def forward(number, call, grad=True):
    return Forward(
        id=number, model=1, call=call, method="forward", template=b"", differentiable=(), grad=grad, inference=False,
        training=grad, autocast=None, key=None, dim=0, reduction="mean", out_dims=None, expected=None,
    )  # fmt: skip


def backward(number, call, source=None, **fields):
    one = to_wire(torch.ones(()))
    fields = {"keep_graph": False, "full": True, **fields}
    return Backward(id=number, model=1, call=call, seeds=(Seed(0, one if source is None else source),), **fields)


def zero(number):
    return ZeroGrad(id=number, model=1, names=(), to_none=True)


def step(number):
    return Step(id=number, optimizer=1, groups=b"", key=None)


def clip(number):
    return ClipGradNorm(id=number, model=1, names=(), max_norm=1.0, norm_type=2.0, error_if_nonfinite=False)


def run(number):
    return Run(id=number, model=1, body=b"")


# ---- plan


def planned(*commands):
    return [(c.id, b.id if b else None, ahead) for c, b, ahead in plan(commands)]


def test_a_forward_takes_its_backward_along():
    found = planned(zero(1), forward(2, 9), backward(3, 9), step(4))
    assert found == [(1, None, False), (2, 3, True), (4, None, False)]
    assert planned(forward(1, 9), zero(2), Drop(id=3), backward(4, 9), step(5)) == [
        (2, None, False), (3, None, False), (1, 4, True), (5, None, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "second",
    [
        backward(2, 8),
        backward(2, 9, keep_graph=True),
        backward(2, 9, full=False),
        backward(2, 9, inputs=(0,)),
        backward(2, 9, links=(0,)),
        backward(2, 9, source=Link(7, 0)),
        run(2),
    ],
)
def test_what_is_not_fused(second):
    assert planned(forward(1, 9), second)[0] == (1, None, False)


def test_only_the_last_backward_before_a_commit_is_armed():
    found = planned(forward(1, 7), backward(2, 7), forward(3, 8), backward(4, 8), clip(5), step(6))
    assert found == [(1, 2, False), (3, 4, True), (5, None, True), (6, None, False)]
    assert [ahead for *_, ahead in planned(backward(1, 7), zero(2), step(3))] == [False, True, False]
    assert [ahead for *_, ahead in planned(backward(1, 7), run(2), step(3))] == [True, True, False]
    assert [ahead for *_, ahead in planned(backward(1, 7))] == [False]


# ---- messages


@pytest.fixture
def worker():
    found = Worker(0, 1, torch.device("cpu"), "here")
    add = AddModel(id=1, model=1, **extra_fields())
    assert found.execute(Message(0, 1, (add,)), {1: (ship(nn.Linear(2, 1)),)}).failure is None
    return found


def extra_fields():
    known = AddModel.__dataclass_fields__
    return {name: value for name, value in {"seed": 0, "compiled": False}.items() if name in known}


def reduce(number):
    return Reduce(id=number, model=1)


def test_a_double_is_answered_again_and_not_done_again(worker):
    first = worker.execute(Message(0, 2, (reduce(2), reduce(3))), {})
    assert first.position == worker.position == 3
    assert worker.execute(Message(0, 2, (reduce(2), reduce(3))), {}) == first
    assert worker.execute(Message(0, 1, (reduce(1),)), {}).position == 3
    assert worker.position == 3


@pytest.mark.parametrize(
    "message", [Message(0, 3, (reduce(2),)), Message(1, 1, (reduce(2),)), Message(2, 2, (reduce(2),), True)]
)
def test_a_gap_is_refused(worker, message):
    reply = worker.execute(message, {})
    assert "StaleMessage" in reply.failure.text
    assert worker.position == 1


def test_an_older_generation_is_refused(worker):
    assert worker.execute(Message(3, 1, (), True), {}).failure is None
    reply = worker.execute(Message(0, 2, (reduce(2),)), {})
    assert "message 2 of generation 0" in reply.failure.text
    assert worker.position == 1


def test_the_three_kinds(worker):
    commands = (reduce(2), run_of(3, lambda module: 7), zero(4), clip(5))
    reply = worker.execute(Message(0, 2, commands), {})
    assert dict(reply.results)[3] == 7
    assert (reply.position, worker.version) == (3, 0)  # the two commits of three kinds of commands, after AddModel


def run_of(number, function):
    from ray import cloudpickle

    return Run(id=number, model=1, body=cloudpickle.dumps((function, (), {})))


def test_after_a_failure_nothing_is_done_until_resumed(worker):
    reply = worker.execute(Message(0, 2, (run_of(2, lambda module: 1 / 0), reduce(3))), {})
    assert isinstance(unpack(reply.failure.exception, reply.failure.text), ZeroDivisionError)
    assert (reply.failure.command, reply.failure.own, worker.position) == (2, True, 1)
    assert worker.execute(Message(0, 3, (reduce(4),)), {}).failure.command == 2
    assert worker.position == 1
    assert worker.execute(Message(1, 1, (reduce(5),), True), {}).failure is None
    assert worker.position == 2


def test_an_unknown_call_is_the_commands_failure(worker):
    reply = worker.execute(Message(0, 2, (Fetch(id=2, call=77, leaf=0),)), {})
    assert reply.failure.command == 2


def test_mispaired_commands_are_noticed():
    """What one rank reduces for one command and its peer for another is never used."""
    group = LocalGroup(2)
    arrived = []
    for rank in range(2):
        group.send(rank, Message(0, 1, (AddModel(id=1, model=1, **extra_fields()),)), {1: (ship(nn.Linear(2, 1)),)})
    for rank in range(2):
        group.send(rank, Message(0, 2, (run_of(2, lambda module: 0), Reduce(id=3 + rank, model=1))), {})
    while len(arrived) < 4:
        group.receive(1.0, arrived)
    group.close()
    for reply in arrived[-2:]:
        assert isinstance(unpack(reply.failure.exception, reply.failure.text), CollectiveError)
        assert "all have to be equal" in reply.failure.text
        assert reply.position == 1


# ---- failures, through DataParallel


class Net(nn.Module):
    """Fails where its traps say: (rank, place) pairs, in this process."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x, y):
        hidden = self.norm(self.first(x))
        if self.__dict__.pop("in_forward", False):
            raise ValueError(f"forward on {threading.current_thread().name}")
        if self.__dict__.pop("in_backward", False):
            hidden.register_hook(explode)
        return F.cross_entropy(self.last(torch.tanh(hidden)), y)


def explode(grad):
    raise ValueError("in backward")


def set_trap(module, place):
    module.__dict__[place] = True


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (8,), generator=generator)


@contextlib.contextmanager
def remote(workers):
    torch.manual_seed(0)
    with DataParallel(Net().double(), workers, backend="local") as model:
        yield model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, steps):
    for step_number in steps:
        optimizer.zero_grad()
        model(*batch(step_number)).backward()
        optimizer.step()


def undisturbed(workers, steps):
    with remote(workers) as (model, optimizer):
        train(model, optimizer, steps)
        return dict(model.state_dict())


@pytest.mark.parametrize("place", ["in_forward", "in_backward"])
@pytest.mark.parametrize(("workers", "ranks"), [(1, (0,)), (2, (1,)), (4, (3,)), (4, (1, 2)), (3, (0, 1, 2))])
def test_a_step_that_failed_did_not_happen(workers, ranks, place):
    """BatchNorm's statistics and momentum included; where only the backward failed, its forward stands."""
    with remote(workers) as (model, optimizer):
        train(model, optimizer, range(5))
        for rank in ranks:
            model.replicas[rank].run(set_trap, place)
        with pytest.raises(ValueError, match=r"forward on|in backward") as caught:
            train(model, optimizer, [99])
        assert f"worker {ranks[0]} " in caught.value.__notes__[0]  # of several at one command, the lowest rank
        train(model, optimizer, range(5, 8))
        found = dict(model.state_dict())
        model.check_sync()
    with remote(workers) as (model, optimizer):
        train(model, optimizer, range(5))
        optimizer.zero_grad()
        if place == "in_backward":
            model(*batch(99))
        train(model, optimizer, range(5, 8))
        expected = dict(model.state_dict())
    # what the driver sends anew after a failure is a commit, where statistics are levelled once more
    exact = {"rtol": 0, "atol": 0} if place == "in_forward" or workers == 1 else {"rtol": 1e-13, "atol": 1e-14}
    torch.testing.assert_close(found, expected, **exact)


def test_the_lowest_command_wins():
    with remote(2) as (model, optimizer):
        train(model, optimizer, range(5))
        model.replicas[0].run(set_trap, "in_backward")
        model.replicas[1].run(set_trap, "in_forward")
        with pytest.raises(ValueError, match="forward on") as caught:
            train(model, optimizer, [99])
        assert "worker 1 " in caught.value.__notes__[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_came_before_in_the_same_step_stands(workers):
    """Accumulation: the first microbatch is kept, the failed one is gone, and later commands are named."""

    def microbatches(model, optimizer, numbers):
        optimizer.zero_grad()
        for number in numbers:
            model(*batch(number)).backward()
        optimizer.step()

    with remote(workers) as (model, optimizer):
        train(model, optimizer, range(5))
        optimizer.zero_grad()
        model(*batch(5)).backward()
        model.flush()
        model.replicas[workers - 1].run(set_trap, "in_forward")
        with pytest.raises(ValueError, match="forward on") as caught:  # noqa: PT012
            model(*batch(6)).backward()
            optimizer.step()
        assert any("not done: Backward, Step" in note for note in caught.value.__notes__)
        model(*batch(7)).backward()
        optimizer.step()
        found = dict(model.state_dict())
        model.check_sync()
    with remote(workers) as (model, optimizer):
        train(model, optimizer, range(5))
        microbatches(model, optimizer, [5, 7])
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("workers", [1, 2])
def test_failures_in_run_and_change(workers):
    with remote(workers) as (model, optimizer):
        train(model, optimizer, range(4))
        for verb in (model.run, model.change):
            with pytest.raises(ZeroDivisionError):
                verb(lambda module: 1 / 0)
        train(model, optimizer, range(4, 6))
        model.change(lambda module: module.last.bias.data.zero_())
        assert model.run(lambda module: module.last.bias.abs().sum().item()) == [0] * workers
        model.check_sync()
        found = dict(model.state_dict())
    expected = undisturbed(workers, range(6))
    expected["last.bias"] = torch.zeros(2, dtype=torch.float64)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_graph_that_waits_across_a_step_outlives_a_failure(workers):
    """A generator's graph waits while the discriminator steps; a failure after its backward takes nothing of it."""

    def play(model, other, optimizers, fails):
        train(model, optimizers[0], range(4))
        optimizers[0].zero_grad()
        waiting = model(*batch(7))
        train(other, optimizers[1], range(4))
        waiting.backward()
        if fails:
            with pytest.raises(ZeroDivisionError):
                model.run(lambda module: 1 / 0)
        optimizers[0].step()
        return dict(model.state_dict())

    states = []
    for fails in (False, True):
        with remote(workers) as (model, optimizer), DataParallel(Net().double(), workers=model) as other:
            optimizers = optimizer, torch.optim.SGD(other.parameters(), lr=0.1)
            states.append({k: v.clone() for k, v in play(model, other, optimizers, fails).items()})
            model.check_sync()
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


class Wide(nn.Module):
    """More than one bucket, so that sums begin during backward; returns its loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(600, 600), nn.Linear(600, 600)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).mean()


def test_two_models_pending_at_one_commit_are_reduced_in_one_order():
    """The second model's sums begin during its backward on the ranks that have rows; a rank without rows must not begin
    with the first model."""
    torch.manual_seed(0)
    small, wide = nn.Linear(600, 1), Wide()
    plain = copy.deepcopy(small), copy.deepcopy(wide)
    x = torch.randn(1, 600)
    with DataParallel(small, 2, backend="local", timeout_s=20) as first, DataParallel(wide, workers=first) as second:
        for a, b in ((first, second), plain):
            optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                a(x).mean().backward()
                b(x).backward()
                optimizer.step()
        for model, net in zip((first, second), plain, strict=True):
            for name, value in net.state_dict().items():
                assert torch.allclose(model.state_dict()[name], value, atol=1e-6), name


def step_with_penalty(model, optimizer):
    penalty = sum(p.square().sum() for p in model.parameters())
    model(torch.ones(4, 2, dtype=torch.float64)).mean().backward()
    penalty.backward()
    optimizer.step()
    model.run(lambda m: None)


def test_a_penalty_after_a_failed_forward_is_dropped_with_it():
    net = nn.Linear(3, 1).double()
    with DataParallel(net, 2, backend="local", timeout_s=20) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):  # until the structure is trusted and nothing waits
            optimizer.zero_grad()
            model(torch.ones(4, 3, dtype=torch.float64)).mean().backward()
            optimizer.step()
        before = model.state_dict()
        with pytest.raises(RuntimeError, match="shapes"):
            step_with_penalty(model, optimizer)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert len(set(model.check_sync())) == 1

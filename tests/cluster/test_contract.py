"""What both kinds of group promise: workers in this process, and workers that are Ray actors."""

import copy
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
import torch.nn.functional as F
from torch import nn

from torchdl_ray import DataParallel
from torchdl_ray.errors import ClosedError, OutOfSync, RemoteTraceback, WorkerLost

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
SIZE = 4
SOURCE = Path(__file__).read_text().splitlines()


class Net(nn.Module):
    """Two layers; `trap` makes one rank fail, and is set by `model.run`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x, y=None):
        trap = self.__dict__.pop("trap", None)
        if trap == "forward":
            raise ValueError("boom")
        if trap == "die":
            os._exit(1)
        if trap == "unpicklable":
            raise Unpicklable(threading.Lock())
        if self.training:
            self.seen += x.mean() * 0.5
        out = self.last(torch.tanh(self.first(x)))
        return out if y is None else (out, F.cross_entropy(out, y))


class Unpicklable(Exception):
    def __init__(self, lock):
        super().__init__("with a lock")
        self.lock = lock


class Fragile(torch.optim.SGD):
    """Fails half way on a rank whose parameter carries a trap: a number that is added to it before."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if (trap := p.__dict__.pop("trap", None)) is not None:
                p.data.add_(trap)
                raise ArithmeticError("in the optimizer")
        return super().step(closure)


def batch(step, rows=12):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def fresh():
    torch.manual_seed(0)
    return Net().double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def set_trap(module, kind):
    module.__dict__["trap"] = kind


def mark(module, trap):
    module.first.weight.trap = trap


@pytest.fixture(scope="module", params=["local", "ray"])
def shared(request) -> Iterator[DataParallel]:
    """One group of four workers for all tests of a kind; its own small model is not used."""
    if request.param == "ray" and not ray.is_initialized():
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    where = {"backend": "local"} if request.param == "local" else {"resources_per_worker": {"CPU": 0.5}}
    model = DataParallel(nn.Linear(1, 1), SIZE, **where)
    yield model
    model.close()


@pytest.fixture
def model(shared) -> Iterator[DataParallel]:
    with DataParallel(fresh(), workers=shared) as model:
        yield model


def expect_equal(model, plain):
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-13, msg=name)
    model.check_sync()


def test_five_steps_are_those_of_plain_pytorch(model):
    plain, before = fresh(), model.version
    losses = train(model, sgd(model.parameters()), range(5))
    assert losses == pytest.approx(train(plain, sgd(plain.parameters()), range(5)), rel=1e-12)
    expect_equal(model, plain)
    assert model.version - before == 5


def test_evaluation(model):
    x, _ = batch(0, rows=9)
    model.eval()
    with torch.no_grad():
        out = model(x)
        torch.testing.assert_close(out.fetch(), fresh()(x))


def test_load_and_state_dict(model):
    plain = fresh()
    train(plain, sgd(plain.parameters()), range(2))
    optimizer = sgd(model.parameters())
    model.load_state_dict(plain.state_dict())
    train(model, optimizer, range(2, 4))
    train(plain, sgd(plain.parameters()), range(2, 4))
    expect_equal(model, plain)


def test_run_on_all_and_on_one(model):
    assert model.run(lambda module, k: k * module.first.weight.shape[0], 2) == [16] * SIZE
    assert model.replicas[2].run(lambda module: module.last.bias.sum().item()) == pytest.approx(
        fresh().last.bias.sum().item()
    )
    kept = model.replicas[1].run(lambda module: {"weight": module.first.weight})["weight"]
    assert torch.equal(kept, fresh().first.weight)
    assert not kept.requires_grad
    if len({m.pid for m in model._stream.group.members}) > 1:
        assert len(set(model.run(lambda module: os.getpid()))) == SIZE


def test_what_cannot_travel_is_said(model):
    with pytest.raises(TypeError, match="lock"):
        model.run(lambda module: threading.Lock())
    with pytest.raises(ZeroDivisionError):
        model.run(lambda module: 1 / 0)
    assert model.run(lambda module: 1) == [1] * SIZE


def test_a_replica_that_differs_is_named(model):
    model.check_sync()
    model.replicas[2].run(lambda module: module.first.weight.data[0, 0].add_(1).item())
    with pytest.raises(OutOfSync, match=r"first\.weight on ranks \[2\]"):
        model.check_sync()


def test_clipping_is_that_of_the_whole_gradient(model):
    plain = fresh()
    optimizer, expected = sgd(model.parameters()), sgd(plain.parameters())
    x, y = batch(0)
    model(x, y)[1].backward()
    norm = model.clip_grad_norm_(0.1)
    optimizer.step()
    plain(x, y)[1].backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    expected.step()
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-6, atol=1e-9)


def test_an_exception_in_forward(model):
    plain = fresh()
    optimizer, expected = sgd(model.parameters()), sgd(plain.parameters())
    train(model, optimizer, range(2))
    train(plain, expected, range(2))
    model.replicas[3].run(set_trap, "forward")
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^boom") as caught:
        train(model, optimizer, [2])
    assert time.monotonic() - start < 10
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    line = next(n for n, text in enumerate(SOURCE, 1) if 'raise ValueError("boom")' in text)
    assert f'{os.path.basename(__file__)}", line {line}' in str(caught.value.__cause__)
    where = caught.value.__notes__[0]
    assert "worker 3" in where
    assert f"step {model.version} " in f"{where} ".replace(",", " ")
    assert "test_contract.py" in where
    train(model, optimizer, range(3, 5))  # step 2 did not happen
    train(plain, expected, range(3, 5))
    expect_equal(model, plain)


def test_an_exception_that_cannot_travel(model):
    model.replicas[1].run(set_trap, "unpicklable")
    with pytest.raises(Unpicklable, match="with a lock"):
        train(model, sgd(model.parameters()), [0])
    model.check_sync()


def test_an_exception_in_the_optimizer_on_one_rank(model):
    """The others have made the step, so it counts, and the torn rank takes it over."""
    plain, before = fresh(), model.version
    optimizer, expected = Fragile(model.parameters(), lr=0.1, momentum=0.9), sgd(plain.parameters())
    train(model, optimizer, range(2))
    train(plain, expected, range(2))
    model.replicas[1].run(mark, 1.0)
    with pytest.raises(ArithmeticError, match="in the optimizer"):  # noqa: PT012 # an error shows at the next wait
        train(model, optimizer, [2])
        model.check_sync()
    train(model, optimizer, [3])
    train(plain, expected, [2, 3])
    expect_equal(model, plain)
    assert model.version - before == 4


def test_an_exception_in_the_optimizer_on_all_ranks(model):
    """As in one process the step is not done, and what it changed before stays changed: here nothing."""
    plain, before = fresh(), model.version
    optimizer, expected = Fragile(model.parameters(), lr=0.1, momentum=0.9), sgd(plain.parameters())
    train(model, optimizer, range(2))
    train(plain, expected, range(2))
    model.run(mark, 0.0)
    with pytest.raises(ArithmeticError, match="in the optimizer"):  # noqa: PT012 # an error shows at the next wait
        train(model, optimizer, [2])
        model.check_sync()
    train(model, optimizer, [3])
    plain(*batch(2))  # its forward stands
    train(plain, expected, [3])
    expect_equal(model, plain)
    assert model.version - before == 3


def test_a_message_and_less_than_a_kilobyte_per_step(model):
    optimizer = sgd(model.parameters())
    train(model, optimizer, range(4))
    stream, sizes = model._stream, []
    stream.reply_bytes = lambda reply: sizes.append(len(pickle.dumps(reply)))
    before = stream.num_messages
    train(model, optimizer, range(4, 14))
    stream.reply_bytes = None
    assert stream.num_messages - before == 10 * SIZE
    assert len(sizes) == 10 * SIZE
    assert max(sizes) < 1000


def test_a_worker_that_dies(local_ray):
    model = DataParallel(fresh(), SIZE, resources_per_worker={"CPU": 0.5})
    plain = copy.deepcopy(model.state_dict())
    pids = [r.pid for r in model.replicas]
    optimizer = sgd(model.parameters())
    train(model, optimizer, range(2))
    model.replicas[2].run(set_trap, "die")
    start = time.monotonic()
    with pytest.raises(WorkerLost, match=f"worker 2 .*pid {pids[2]}.*step 2"):
        train(model, optimizer, [2])
    assert time.monotonic() - start < 10
    for use in (lambda: model(batch(0)[0]), model.check_sync, lambda: model.run(print)):
        with pytest.raises(ClosedError, match="worker 2"):
            use()
    with pytest.warns(UserWarning, match="lost"):
        model.close()
    assert plain.keys() == model.module.state_dict().keys()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") and _state(pid) != "Z" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"

"""The stream: what it sends and keeps, and that an interrupt at any moment loses and doubles nothing."""

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.interrupts import WARM_UP_STEPS, AtLine, Loop, batch
from torchdl_ray import DataParallel
from torchdl_ray.entries import Log
from torchdl_ray.errors import ClosedError, WaitTimeout, WorkerLost
from torchdl_ray.group import Lost
from torchdl_ray.program import Backward, Drop, Forward, Reduce, Reply, Run, Step, ZeroGrad
from torchdl_ray.stream import MAX_IN_FLIGHT, MAX_LOCAL_ENTRIES, MAX_WAITING_STEPS, Stream

FORWARD = {
    "model": 1, "call": 5, "method": "forward", "template": b"", "differentiable": (), "inference": False,
    "autocast": None, "key": None, "dim": 0, "reduction": "mean", "out_dims": None, "expected": None,
}  # fmt: skip


class Fake:
    """A group that keeps what it was sent; `answer()` lets the ranks answer everything, oldest first."""

    is_local = False

    def __init__(self, size=2):
        self.size, self.members, self.devices = size, (), ("cpu",) * size
        self.sent, self.open, self.replies = [], [], []
        self.at_send = lambda: None
        self.closed, self.stopped = False, ""
        self.automatic = False

    def put(self, data):
        return data

    def send(self, rank, message, payload):
        self.at_send()
        self.sent.append((rank, message))
        self.open.append((rank, message))
        if self.automatic:
            self.answer()

    def answer(self, count=None):
        done, self.open = self.open[:count], self.open[count:] if count is not None else []
        for rank, m in done:
            results = tuple((c.id, f"{type(c).__name__} of {rank}") for c in m.commands)
            self.replies.append(Reply(rank, m.generation, m.number, 0, results))

    def receive(self, timeout_s, arrived):
        while self.replies:
            arrived.append(self.replies[0])
            del self.replies[0]

    def stop(self, reason):
        self.stopped = reason

    def close(self):
        self.closed = True


@pytest.fixture
def group():
    return Fake()


@pytest.fixture
def stream(group):
    return Stream(group, timeout_s=0.2)


def step(stream):
    return stream.record(Step, optimizer=1, groups=b"", key=None)


def names(message):
    return [type(c).__name__ for c in message.commands]


def test_recording_sends_nothing(stream, group):
    stream.record(ZeroGrad, model=1, names=(), to_none=True)
    step(stream)
    assert group.sent == []
    stream.flush()
    assert [(rank, m.number, names(m)) for rank, m in group.sent] == [
        (0, 1, ["ZeroGrad", "Step"]),
        (1, 1, ["ZeroGrad", "Step"]),
    ]
    assert stream.num_messages == 2


def test_answers_come_by_rank(stream, group):
    group.automatic = True
    assert stream.record(Run, model=1, body=b"").wait("it") == ["Run of 0", "Run of 1"]


def test_the_log_is_written_before_anything_is_sent(stream, group):
    def look():
        assert [type(e.command).__name__ for o in stream._outbox for e in o.entries] == ["Step"]

    group.at_send = look
    step(stream)
    stream.flush()


def test_what_is_under_way_and_what_gathers_is_bounded(stream, group):
    for _ in range(MAX_IN_FLIGHT + MAX_WAITING_STEPS - 1):
        step(stream)
        stream.step_boundary()
    assert len(group.sent) == MAX_IN_FLIGHT * group.size
    step(stream)
    with pytest.raises(WaitTimeout, match=r"an earlier step to finish.*ranks \[0, 1\]"):
        stream.step_boundary()
    group.answer(2)  # the first message
    stream.step_boundary()
    assert names(group.sent[-1][1]) == ["Step"] * MAX_WAITING_STEPS
    assert group.sent[-1][1].number == MAX_IN_FLIGHT + 1


def test_version_and_ordinal(stream):
    stream.record(Forward, **FORWARD, grad=True, training=True)
    stream.record(Forward, **FORWARD, grad=False, training=False)
    assert (stream.version, stream.ordinal, stream._counts.local) == (0, 1, 1)
    stream.record(Reduce, model=1)
    assert (stream.version, stream.ordinal, stream._counts.local) == (0, 1, 0)  # no mask is drawn twice within a step
    step(stream)
    assert (stream.version, stream.ordinal, stream._counts.local) == (1, 0, 0)


def test_the_log_keeps_local_commands_until_a_commit(stream, group):
    group.automatic = True
    stream.record(Forward, **FORWARD, grad=True, training=True)
    stream.record(Backward, model=1, call=5, seeds=(), keep_graph=False, full=True)
    stream.record(Run, model=1, body=b"")
    stream.drop_call(5)
    stream.drop_call(99)
    stream.finish()
    assert [type(e.command) for e in stream._log.local] == [Forward, Backward, Drop]
    step(stream)
    stream.finish()
    assert stream._log == Log()


def test_pure_commands_leave_the_log(stream, group):
    group.automatic = True
    for k in range(10_000):
        stream.record(Forward, **{**FORWARD, "call": k}, grad=False, training=False).wait("it")
        stream.drop_call(k)
    assert stream._log == Log()
    assert stream._recorded == stream._outbox == []
    assert len(stream._dead_calls) <= 1


def test_local_commands_without_a_commit_are_bounded(stream, group):
    group.automatic = True
    for _ in range(200):
        stream.record(Forward, **FORWARD, grad=True, training=True)
        stream.record(Backward, model=1, call=5, seeds=(), keep_graph=False, full=True)
        stream.finish()
        assert len(stream._log.local) <= MAX_LOCAL_ENTRIES
    reductions = [m for _, m in group.sent if "Reduce" in names(m)]
    assert len(reductions) == 2 * (2 * 200 // MAX_LOCAL_ENTRIES)
    assert stream.ordinal == 200


def test_drops_go_along_and_only_then(stream, group):
    group.automatic = True
    stream.drop_call(1)
    stream.drop_value(2)
    stream.flush(drops=False)
    assert group.sent == []
    step(stream)
    stream.flush(drops=False)
    drop = group.sent[0][1].commands[1]
    assert (drop.calls, drop.values) == ((1,), (2,))


def test_an_old_answer_is_ignored(stream, group):
    pending = step(stream)
    stream.flush()
    group.replies = [Reply(r, 7, 1, 0, ()) for r in range(2)]
    stream.collect("nothing", timeout_s=0)
    assert pending.values is None


def test_an_answer_that_comes_twice_counts_once(stream, group):
    pending = step(stream)
    stream.flush()
    group.open.insert(1, group.open[0])
    group.answer(2)
    group.replies[1] = Reply(0, 0, 1, 0, ())
    group.answer()
    assert pending.wait("it") == ["Step of 0", "Step of 1"]


def test_a_wait_says_what_it_waits_for(stream):
    pending = step(stream)
    with pytest.raises(WaitTimeout, match=r"for the answer, and ranks \[0, 1\].*while it ran Step .*test_stream\.py"):
        pending.wait("the answer")


def test_a_lost_worker_closes(stream, group):
    pending = step(stream)
    stream.flush()
    group.replies = [Lost(1, "10.0.0.1", 77, "it was killed.")]
    with pytest.raises(WorkerLost, match=r"worker 1 \(node 10.0.0.1, pid 77\) is lost at step 0.*it was killed"):
        pending.wait("it")
    assert group.closed
    assert group.stopped
    for use in (stream.flush, lambda: step(stream), lambda: pending.wait("it")):
        with pytest.raises((ClosedError, WorkerLost), match="worker 1"):
            use()
    stream.close()


def test_close_waits_for_what_was_recorded(stream, group):
    group.automatic = True
    pending = step(stream)
    stream.close()
    assert pending.values is not None
    assert group.closed
    with pytest.raises(ClosedError):
        step(stream)


# ---- interrupts


def disturbed(monkeypatch, workers, begin):
    """Steps, the n-th under the n-th interrupt, until none happens any more; compared with a run without any.

    `begin(loop, n)` returns what is around the verbs of step n, and has an attribute `raised` afterwards.
    """
    loop = Loop(monkeypatch, workers)
    with loop.model:
        losses = []
        for number in itertools.count(1):
            loss = loop.begin(number)
            interrupt = begin(loop, number)
            losses.append(loop.finish(loss, interrupt if isinstance(interrupt, AtLine) else None))
            raised, loop.group.verb = interrupt.raised, ""
            if not raised:
                break
        found = loop.state()
        loop.model.check_sync()
        assert loop.model.version == WARM_UP_STEPS + number
    calm = Loop(monkeypatch, workers)
    with calm.model:
        assert losses == [calm.step(k + 1) for k in range(number)]
        expected = calm.state()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    return number


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verb", ["send", "receive"])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_at_every_message_and_answer(monkeypatch, workers, verb, after):
    def begin(loop, number):
        loop.group.arm(verb, number, after)
        return loop.group

    assert disturbed(monkeypatch, workers, begin) > (workers if verb == "send" else 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_at_every_line_of_the_stream(monkeypatch, workers):
    files = ("torchdl_ray/stream.py", "torchdl_ray/entries.py")
    assert disturbed(monkeypatch, workers, lambda loop, number: AtLine(number, files)) > 50


def test_ctrl_c_inside_the_model_is_an_interrupt(monkeypatch):
    """Without workers of its own the model runs here: the interrupted call is gone, all else stands."""

    class Slow(nn.Linear):
        trap = False

        def forward(self, x):
            if Slow.trap:
                Slow.trap = False
                raise KeyboardInterrupt
            return super().forward(x)

    torch.manual_seed(0)
    module = Slow(3, 2)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(4, 3)
    with DataParallel(module, 0) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).sum().backward()
        Slow.trap = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model(x).sum().backward()
        optimizer.step()
        found = model.state_dict()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x).sum().backward()
    plain(x).sum().backward()
    optimizer.step()
    assert torch.equal(found["weight"], plain.weight)


# ---- what grows


@pytest.mark.parametrize("workers", [1, 2])
def test_evaluation_leaves_nothing(workers):
    with DataParallel(nn.Linear(4, 2), workers, backend="local") as model, torch.no_grad():
        model.eval()
        kept = model._stream.group.workers
        for _ in range(300):
            model(torch.randn(4, 4)).sum().item()
        gc.collect()
        model.flush()
        model._stream.finish()
        assert model._stream._log == Log()
        assert all(len(w.state.calls.live) <= 1 for w in kept)


def test_accumulation_past_the_limit_is_exact():
    torch.manual_seed(0)
    plain = nn.Linear(4, 2).double()
    with DataParallel(nn.Linear(4, 2).double(), 2, backend="local") as model:
        model.load_state_dict(plain.state_dict())
        optimizer, expected = (torch.optim.SGD(p, lr=0.1) for p in (model.parameters(), plain.parameters()))
        for number in range(100):
            x, y = batch(number)
            for net in (model, plain):
                (F.cross_entropy(net(x.double()), y) / 100).backward()
        optimizer.step()
        expected.step()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-12, atol=1e-13)

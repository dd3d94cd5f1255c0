"""Decisions after a failure, as values."""

from torchdl_ray.entries import Counts, Entry, Log, Outgoing
from torchdl_ray.program import Backward, Drop, Failure, Forward, Reply, Run, Step, Undo, ZeroGrad
from torchdl_ray.setback import decide, describe, failures


def forward(number, call=0, grad=True):
    return Forward(
        id=number, model=1, call=call or number, method="forward", template=b"", differentiable=(), grad=grad,
        inference=False, training=grad, autocast=None, key=None, dim=0, reduction="mean", out_dims=None, expected=None,
    )  # fmt: skip


def backward(number, call):
    return Backward(id=number, model=1, call=call, seeds=(), keep_graph=False, full=True)


def step(number):
    return Step(id=number, optimizer=1, groups=b"", key=None)


def zero(number):
    return ZeroGrad(id=number, model=1, names=("w",), to_none=True)


def entries(*commands, start=Counts()):  # noqa: B008 # frozen
    found, counts = [], start
    for command in commands:
        counts = counts.after(command)
        found.append(Entry(command, counts))
    return found


def ids(found):
    return [e.command.id for e in found]


def failed(number, torn=False, own=True):
    return Failure(number, "train.py:3", own, b"x", "text", torn)


def outgoing(number, commands, positions, failures_by_rank=()):
    replies = {r: Reply(r, 0, number, p, (), dict(failures_by_rank).get(r)) for r, p in enumerate(positions)}
    return Outgoing(number, tuple(commands), False, replies)


def test_the_first_failure_wins():
    out = [
        outgoing(1, [], (0, 0, 0), [(2, failed(7)), (1, failed(7)), (0, failed(3, own=False))]),
        outgoing(2, [], (0, 0, 0), [(1, failed(5))]),
    ]
    assert [(command, rank) for command, rank, _ in failures(out)] == [(5, 1), (7, 1), (7, 2), (3, 0)]


def test_what_was_before_stands_and_is_done_again_from_the_last_commit():
    log = entries(forward(1), backward(2, 1))
    sent = entries(step(3), forward(4), backward(5, 4), forward(6), step(7), start=log[-1].counts)
    waiting = entries(zero(8), Drop(id=9, calls=(4,)), start=sent[-1].counts)
    made = decide(Log(tuple(log)), [outgoing(1, sent, (1, 1), [(0, failed(6))])], waiting, 6, log[-1].counts)
    assert ids(made.stand) == [3, 4, 5]
    assert ids(made.gone) == [6, 7, 8, 9]
    assert ids(made.redo.local) == [4, 5]
    assert ids(made.drops) == [9]
    assert made.zeroed == ((1, ("w",)),)
    assert (made.source, made.num_steps, made.counts) == (None, 1, sent[2].counts)
    assert made.counts == Counts(1, 1, 2, frozenset({1}))


def test_local_commands_of_the_log_are_done_again():
    log = entries(forward(1), backward(2, 1))
    sent = entries(forward(3), step(4), start=log[-1].counts)
    made = decide(Log(tuple(log)), [outgoing(4, sent, (0, 0), [(1, failed(3))])], [], 3, log[-1].counts)
    assert ids(made.redo.local) == [1, 2]
    assert made.counts == log[-1].counts
    assert made.num_steps == 0


def test_nothing_before():
    sent = entries(forward(1), start=Counts(5))
    made = decide(Log(), [outgoing(1, sent, (0, 0), [(1, failed(1))])], [], 1, Counts(5))
    assert (made.stand, made.redo, made.counts) == ((), Log(), Counts(5))


def test_a_torn_rank_takes_over_a_step_that_others_made():
    sent = entries(forward(1), backward(2, 1), step(3), forward(4))
    made = decide(Log(), [outgoing(1, sent, (0, 1, 1), [(0, failed(3, torn=True))])], [], 3, Counts())
    assert made.source == 1
    assert made.num_steps == 1  # it counts
    assert made.counts == sent[2].counts
    assert made.redo.local == ()  # its gradients are in it


def test_all_torn_takes_the_first():
    sent = entries(forward(1), step(2))
    both = [(0, failed(2, torn=True)), (1, failed(2, torn=True))]
    made = decide(Log(), [outgoing(1, sent, (0, 0), both)], [], 2, Counts())
    assert (made.source, made.num_steps) == (0, 0)
    assert ids(made.redo.local) == [1]


def test_the_log_keeps_drops_of_its_own_calls_alone():
    found = Log().after(entries(forward(1), forward(2, grad=False), Drop(id=3, calls=(2,)), Drop(id=4, calls=(1, 2))))
    assert ids(found.local) == [1, 4]
    assert found.after(entries(step(5))) == Log()


def test_a_graph_that_waits_for_its_backward_is_kept_past_a_commit():
    found = Log().after(entries(forward(1), forward(2), backward(3, 2), step(4)))
    assert ids(found.waiting) == [1]
    assert found.graphs() == ()
    found = found.after(entries(forward(5), backward(6, 5), backward(7, 1)))
    assert ids(found.graphs()) == [1]
    again = entries(forward(1), Undo(id=8), forward(5), backward(6, 5), backward(7, 1))
    assert ids(Log((), found.waiting).after(again).local) == [5, 6, 7]
    assert found.after(entries(step(9))) == Log()


def test_words():
    commands = [forward(1), backward(2, 1), Drop(id=3), step(4)]
    assert describe(commands) == "Forward, Backward, Step"
    assert describe([Run(id=k, model=1, body=b"") for k in range(9)]) == ", ".join(["Run"] * 6) + " and 3 more"
    assert describe([]) == ""

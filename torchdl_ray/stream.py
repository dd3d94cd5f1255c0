"""The command stream: record commands, send them as few messages, bound what is in flight, keep the log.

Runs on the driver; one stream per group of workers. `record` only appends; a flush turns what was recorded into one
message per worker. At most `MAX_IN_FLIGHT` messages are on their way at step boundaries; steps recorded meanwhile
gather and go out as one message. What crosses: one message per worker and flush, one reply each.

Rules (recovery rests on them): an entry is in the log before anything is sent; what a rank did not get yet is sent
again at the next verb, and workers ignore doubles, so an interrupt ends only the driver's waiting; the log keeps the
local commands since the last commit that every rank has acknowledged.

Invariant: every state change is one assignment or one append, so that an interrupt between two lines loses nothing.
"""

from __future__ import annotations

import collections
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from . import remote_exception
from .entries import Entry, Outgoing, Pending, user_site
from .errors import ClosedError, CollectiveError, TorchdlError, WaitTimeout, WorkerLost
from .group import Group, Lost
from .program import Command, Copy, Drop, Forward, Kind, Message, Reduce, Reply, Step, ZeroGrad
from .setback import decide, describe, failures, forwards

MAX_IN_FLIGHT = 2  # messages on their way at a step boundary
MAX_WAITING_STEPS = 8  # steps that gather while those are under way
MAX_LOCAL_ENTRIES = 64  # local commands without a commit, after which the stream asks for a reduction


class Stream:
    """Records commands for a group of workers and brings their answers home.

    Args:
        group: the workers.
        timeout_s: how long to wait without any answer before WaitTimeout.
        sync: wait after every command, so that errors show at their line.
    """

    def __init__(self, group: Group, *, timeout_s: float, sync: bool = False) -> None:
        self.group, self.timeout_s, self.sync = group, timeout_s, sync
        self.version = 0  # optimizer steps recorded
        self.ordinal = 0  # forwards recorded since the last commit that may draw random numbers
        self.num_messages = 0
        self.users = 0  # models that live on these workers
        self.reply_bytes: Callable[[Reply], None] | None = None  # a test's hook
        self.on_drop: list[Callable[[tuple[Command, ...]], None]] = []  # told which commands a failure dropped
        self._id = 0
        self._generation = 0
        self._log: list[Entry] = []  # acknowledged local commands since the last acknowledged commit
        self._recorded: list[Entry] = []
        self._outbox: list[Outgoing] = []
        self._made = (0, 0)  # the last message made in this generation: its number and its last command
        self._sent = [0] * group.size
        self._steps_done = 0
        self._trained: frozenset[int] = frozenset()  # models that a training forward changed since the last commit
        self._times: collections.deque[tuple[float, int]] = collections.deque(maxlen=32)
        self._dead_calls: collections.deque[int] = collections.deque()
        self._dead_values: collections.deque[int] = collections.deque()
        self._closed: BaseException | None = None

    # ---- recording

    def new_id(self) -> int:
        """A number that no command, call or value of this stream has."""
        self._id += 1
        return self._id

    def record(
        self,
        kind: type[Command],
        payload: Sequence[tuple[Any, ...]] | None = None,
        *,
        id: int | None = None,
        **fields: Any,
    ) -> Pending:
        """Append a command; nothing is sent yet (unless `sync`). Costs no message.

        Args:
            kind: the command's class.
            payload: for each rank a tuple of handles from `group.put`, or None.
            id: a number from `new_id` that the caller has given away already.
            fields: the command's fields.
        """
        self.check_open()
        command = kind(id=self.new_id() if id is None else id, site=user_site(), **fields)
        pending = Pending(self, command)
        self._recorded.append(Entry(command, payload, weakref.ref(pending)))
        if isinstance(command, Step):
            self.version += 1
        if command.kind is Kind.COMMIT:
            self._trained, self.ordinal = frozenset(), 0
        elif isinstance(command, Forward) and command.is_local:
            self.ordinal += 1
            if command.training:
                self._trained |= {command.model}
        if self.sync:
            pending.wait(f"{type(command).__name__} (sync=True)")
        return pending

    def level(self, model: int) -> None:
        """Before anybody looks at buffers: if a training forward ran since the last commit, make them equal on all
        replicas by a commit of their own. Costs a command, no wait.
        """
        if model in self._trained and self.group.size > 1:
            self.record(Reduce, model=model)

    def drop_call(self, call: int) -> None:
        """Forget a call with the next message. Safe at any moment, also from a finaliser."""
        self._dead_calls.append(call)

    def drop_value(self, value: int) -> None:
        """Forget a value with the next message. Safe at any moment, also from a finaliser."""
        self._dead_values.append(value)

    def check_open(self) -> None:
        """Raise ClosedError after `close` or after a loss."""
        if self._closed is not None:
            raise ClosedError(str(self._closed)) from self._closed

    # ---- sending

    def step_boundary(self) -> None:
        """To be called when a step was recorded: sends it, or lets it gather while enough messages are under way."""
        self.collect("a reply", timeout_s=0)
        if len(self._outbox) < MAX_IN_FLIGHT:
            self.flush()
            return
        steps = sum(isinstance(e.command, Step) for e in self._waiting())
        if steps >= MAX_WAITING_STEPS:
            while len(self._outbox) >= MAX_IN_FLIGHT:
                self.collect("an earlier step to finish")
            self.flush()

    def flush(self) -> None:
        """Send everything recorded, as one message per rank; does not wait. Raises what earlier commands raised."""
        self.check_open()
        self._record_drops()
        entries = self._waiting()
        if entries:
            number = self._made[0] + 1
            self._outbox.append(Outgoing(number, tuple(entries), False))
            self._made = (number, entries[-1].command.id)
            self._recorded = [e for e in self._recorded if e.command.id > self._made[1]]
        self._send_missing()
        self.collect("a reply", timeout_s=0)

    def finish(self) -> None:
        """Send everything and wait until every rank has done it."""
        self.flush()
        while self._outbox:
            self.collect("all recorded commands to finish")

    def _waiting(self) -> list[Entry]:
        made = max([self._made[1], *(o.entries[-1].command.id for o in self._outbox if o.entries)])
        return [e for e in self._recorded if e.command.id > made]

    def _record_drops(self) -> None:
        if self._dead_calls or self._dead_values:
            calls, values = tuple(self._dead_calls), tuple(self._dead_values)
            command = Drop(id=self.new_id(), calls=calls, values=values)
            self._recorded.append(Entry(command))
            for _ in calls:
                self._dead_calls.popleft()
            for _ in values:
                self._dead_values.popleft()

    def _send_missing(self) -> None:
        for outgoing in list(self._outbox):
            commands = tuple(e.command for e in outgoing.entries)
            message = Message(self._generation, outgoing.number, commands, outgoing.resume)
            for rank in range(self.group.size):
                if self._sent[rank] < outgoing.number:
                    payload = {e.command.id: e.payload[rank] for e in outgoing.entries if e.payload is not None}
                    self.group.send(rank, message, payload)
                    self._sent[rank] = outgoing.number
                    self.num_messages += 1

    # ---- receiving

    def collect(self, what: str, timeout_s: float | None = None) -> None:
        """Take in the replies that have come; with `timeout_s` None wait for at least one.

        Raises:
            WaitTimeout, WorkerLost, and what a command raised on a worker.
        """
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        if not self._outbox:
            return
        deadline = time.monotonic() + wait_s
        while True:
            arrived = self.group.receive(max(0.0, min(1.0, deadline - time.monotonic())))
            for item in arrived:
                self._take(item)
            while self._outbox and len(self._outbox[0].replies) == self.group.size and not failures(self._outbox):
                self._acknowledge(self._outbox[0])
            if failures(self._outbox):
                self._fail()
            if arrived or wait_s == 0:
                return
            if time.monotonic() >= deadline:
                raise WaitTimeout(self._describe_wait(what, wait_s))

    def _take(self, item: Reply | Lost) -> None:
        if isinstance(item, Lost):
            self._lose(item)
        elif item.generation == self._generation:
            for outgoing in self._outbox:
                if outgoing.number == item.number:
                    outgoing.replies.setdefault(item.rank, item)
            if self.reply_bytes is not None:
                self.reply_bytes(item)

    def _acknowledge(self, outgoing: Outgoing) -> None:
        """All ranks did this message: deliver the answers, and keep of it what a replay would need."""
        outgoing.deliver(outgoing.entries, self.group.size)
        log = list(self._log)
        for entry in outgoing.entries:
            if entry.command.kind is Kind.COMMIT:
                log.clear()
            elif entry.is_local:
                log.append(entry)
        steps = sum(isinstance(e.command, Step) for e in outgoing.entries)
        self._log, self._outbox, self._steps_done = log, self._outbox[1:], self._steps_done + steps
        if steps:
            self._times.append((time.monotonic(), self._steps_done))

    @property
    def num_local(self) -> int:
        """Local commands since the last commit: what a replay would do again."""
        count = 0
        for entry in [*self._log, *(e for o in self._outbox for e in o.entries), *self._waiting()]:
            count = 0 if entry.command.kind is Kind.COMMIT else count + entry.is_local
        return count

    # ---- failure

    def _fail(self) -> None:
        """A command failed: hear all ranks out, go back to the last commit, redo what stood before, and raise."""
        deadline = time.monotonic() + self.timeout_s
        self._send_missing()
        while any(len(o.replies) < self.group.size for o in self._outbox):
            for item in self.group.receive(1.0):
                self._take(item)
            if time.monotonic() > deadline:
                raise WaitTimeout(self._describe_wait("all ranks to stop after a failure", self.timeout_s))
        number, rank, failure = failures(self._outbox)[0]
        exception = remote_exception.unpack(failure.exception, failure.text) if failure.exception else None
        if not failure.own or exception is None:
            self.close(exception or CollectiveError(f"rank {rank}: {failure.text}"))
            self.check_open()
        assert exception is not None
        self._go_back(number, exception)
        raise exception

    def _go_back(self, number: int, exception: BaseException) -> None:
        setback = decide(self._log, self._outbox, self._waiting(), number)
        for outgoing in self._outbox:
            outgoing.deliver([e for e in outgoing.entries if e.command.id < number], self.group.size)
        first: list[Entry] = []
        if setback.source is not None:
            first.append(Entry(Copy(id=self.new_id(), source=setback.source)))
        for model, names in setback.zeroed:
            first.append(Entry(ZeroGrad(id=self.new_id(), model=model, names=names, to_none=True)))
        again = (*first, *setback.redo, *setback.drops)
        self._generation += 1
        self._sent = [0] * self.group.size
        self._made = (1, self._id)
        self._log, self._recorded, self._outbox = [], [], [Outgoing(1, again, True)]
        self.version = self._steps_done = self._steps_done + setback.num_steps
        redone = forwards(setback.redo)
        self.ordinal, self._trained = len(redone), frozenset(c.model for c in redone if c.training)
        for entry in setback.gone:
            if entry.pending is not None:
                entry.pending.error = exception
        dropped = [e.command for e in setback.gone]
        if describe(dropped[1:]) and not isinstance(exception, TorchdlError):
            exception.add_note(f"recorded after it and not done: {describe(dropped[1:])}")
        for tell in self.on_drop:
            tell(tuple(dropped))
        self._send_missing()

    def _lose(self, lost: Lost) -> None:
        """A worker process is gone: free the others and close."""
        where = self._current(lost.rank)
        error = WorkerLost(
            f"worker {lost.rank} (node {lost.node}, pid {lost.pid}) died at step {self._steps_done}{where}: "
            f"{lost.reason} The model is closed; build it again from its last state_dict."
        )
        self.group.stop(f"worker {lost.rank} died")
        self.close(error)
        raise error

    def _current(self, rank: int) -> str:
        for outgoing in self._outbox:
            if rank not in outgoing.replies and outgoing.entries:
                commands = [e.command for e in outgoing.entries]
                return f", while it ran {describe(commands)} (recorded at {commands[0].site})"
        return ""

    def _describe_wait(self, what: str, waited_s: float) -> str:
        missing = sorted({r for o in self._outbox for r in range(self.group.size) if r not in o.replies})
        where = self._current(missing[0]) if missing else ""
        return (
            f"waited {waited_s:.0f} s for {what}, and ranks {missing} answered nothing{where}. A longer step needs a "
            "larger timeout_s; py-spy shows what a worker's process is doing."
        )

    def steps_per_s(self) -> float | None:
        """The rate of the steps that were answered, over the last seconds; None before two of them."""
        if len(self._times) < 2 or self._times[-1][0] == self._times[0][0]:
            return None
        (start, first), (end, last) = self._times[0], self._times[-1]
        return (last - first) / (end - start)

    # ---- the end

    def abandon(self) -> None:
        """Let the workers go without waiting for anything. Idempotent."""
        self.close(ClosedError("the model was closed before it was ready"))

    def close(self, reason: BaseException | None = None) -> None:
        """Wait for what was recorded (unless it failed) and let the workers go. Idempotent."""
        if self._closed is not None:
            return
        try:
            if reason is None:
                self.finish()
        finally:
            self._closed = reason or ClosedError("the model was closed")
            for outgoing in self._outbox:
                for entry in outgoing.entries:
                    if entry.pending is not None and entry.pending.values is None:
                        entry.pending.error = self._closed
            self._log, self._recorded, self._outbox = [], [], []
            self.group.close()

"""The command stream: record commands, send them as few messages, bound what is in flight, keep the log.

Runs on the driver; one stream per group of workers. `record` only appends; a flush turns what was recorded into one
message per worker. At most `MAX_IN_FLIGHT` messages are on their way at step boundaries; steps recorded meanwhile
gather and go out as one message. What crosses: one message per worker and flush, one reply each.

Rules (recovery rests on them): an entry is in the log before anything is sent; what a rank did not get yet is sent
again at the next verb, and workers ignore doubles, so an interrupt ends only the driver's waiting; the log keeps the
local commands since the last commit that every rank has acknowledged.

Invariant: every state change is one statement (an append, or assignments side by side that no call parts), so that an
interrupt between two lines loses nothing; whatever is done twice because of it, is the same the second time.
"""

from __future__ import annotations

import collections
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from . import remote_exception
from .entries import Counts, Entry, Log, Outgoing, Pending, user_site
from .errors import ClosedError, CollectiveError, RemoteError, TorchdlError, WaitTimeout, WorkerLost
from .group import Group, Lost
from .program import Backward, Command, Copy, Drop, Forward, Link, Message, Reduce, Reply, Step, Undo, ZeroGrad
from .setback import Setback, decide, describe, failures

MAX_IN_FLIGHT = 2  # messages on their way at a step boundary
MAX_WAITING_STEPS = 8  # steps that gather while those are under way
MAX_LOCAL_ENTRIES = 64  # local commands without a commit, after which the stream records a reduction


class Stream:
    """Records commands for a group of workers and brings their answers home.

    Args:
        group: the workers.
        timeout_s: how long to wait without any answer before WaitTimeout.
        sync: wait after every command, so that errors show at their line.
    """

    def __init__(self, group: Group, *, timeout_s: float, sync: bool = False) -> None:
        self.group, self.timeout_s, self.sync = group, timeout_s, sync
        self.num_messages = 0
        self.users = 0  # models that live on these workers
        self.reply_bytes: Callable[[Reply], None] | None = None  # a test's hook
        self.on_drop: list[Callable[[tuple[Command, ...]], None]] = []  # told which commands a failure dropped
        self._id = 0
        self._generation = 0
        self._log = Log()  # of what is acknowledged
        self._recorded: list[Entry] = []
        self._outbox: list[Outgoing] = []
        self._number = 0  # of the last message made in this generation
        self._sent = [0] * group.size
        self._arrived: list[Reply | Lost] = []  # not taken in yet
        self._acknowledged = Counts()  # where the stream stands after the last message that all ranks did
        self._steps_done = 0
        self._times: collections.deque[tuple[float, int]] = collections.deque(maxlen=32)
        self._dead_calls: collections.deque[int] = collections.deque()
        self._dead_values: collections.deque[int] = collections.deque()
        self._closed: BaseException | None = None

    # ---- recording

    def new_id(self) -> int:
        """A number that no command, call or value of this stream has."""
        self._id += 1
        return self._id

    def record(self, kind: type[Command], payload: Sequence[tuple[Any, ...]] | None = None, **fields: Any) -> Pending:
        """Append a command; nothing is sent yet (unless `sync`). Costs no message.

        Args:
            kind: the command's class.
            payload: for each rank a tuple of handles from `group.put`, or None.
            fields: the command's fields.
        """
        if self._closed is not None:
            self.check_open()
        if kind is Forward or kind is Backward:
            self._record_drops()
            if self._counts.local >= MAX_LOCAL_ENTRIES and not any(
                isinstance(seed.source, Link) for seed in fields.get("seeds", ())
            ):
                self._append(Reduce(id=self.new_id(), site=user_site(), model=fields["model"]))
        pending = self._append(kind(id=self.new_id(), site=user_site(), **fields), payload)
        if self.sync:
            pending.wait(f"{kind.__name__} (sync=True)")
        return pending

    def _append(self, command: Command, payload: Sequence[tuple[Any, ...]] | None = None) -> Pending:
        pending = Pending(self, command)
        self._recorded.append(Entry(command, self._counts.after(command), payload, weakref.ref(pending)))
        return pending

    @property
    def _counts(self) -> Counts:
        if self._recorded:
            return self._recorded[-1].counts
        for outgoing in reversed(self._outbox):
            if outgoing.entries:
                return outgoing.entries[-1].counts
        return self._acknowledged

    @property
    def version(self) -> int:
        """Optimizer steps recorded."""
        return self._counts.version

    @property
    def ordinal(self) -> int:
        """Forwards recorded since the last step that may draw random numbers."""
        return self._counts.ordinal

    def level(self, model: int) -> None:
        """Before anybody looks at buffers: if a training forward ran since the last commit, make them equal on all
        replicas by a commit of their own. Costs a command, no wait.
        """
        if model in self._counts.trained and self.group.size > 1:
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
        if len(self._outbox) >= MAX_IN_FLIGHT:
            self.collect("a reply", timeout_s=0)
        if len(self._outbox) < MAX_IN_FLIGHT:
            self._dispatch()
            if self.group.is_local:
                self.collect("a reply", timeout_s=0)  # what went wrong is told at once
            return
        steps = sum(isinstance(e.command, Step) for e in self._waiting())
        if steps >= MAX_WAITING_STEPS:
            while len(self._outbox) >= MAX_IN_FLIGHT:
                self.collect("an earlier step to finish")
            self.flush()

    def flush(self, drops: bool = True) -> None:
        """Send everything recorded, as one message per rank; does not wait.

        Args:
            drops: whether what was only forgotten is worth a message of its own.
        Raises:
            what earlier commands raised.
        """
        self._dispatch(drops)
        self.collect("a reply", timeout_s=0)

    def _dispatch(self, drops: bool = True) -> None:
        self.check_open()
        if self._recorded or drops:
            self._record_drops()
        if entries := tuple(self._recorded):
            outbox, rest = [*self._outbox, Outgoing(self._number + 1, entries, False)], self._recorded[len(entries) :]
            self._outbox, self._number, self._recorded = outbox, self._number + 1, rest
        self._send_missing()

    def finish(self) -> None:
        """Send everything and wait until every rank has done it."""
        self.flush()
        while self._outbox:
            self.collect("all recorded commands to finish")

    def _waiting(self) -> list[Entry]:
        return list(self._recorded)

    def _record_drops(self) -> None:
        num_calls, num_values = len(self._dead_calls), len(self._dead_values)
        if num_calls or num_values:
            # by index: a finaliser may append at any moment
            calls = tuple(self._dead_calls[k] for k in range(num_calls))
            values = tuple(self._dead_values[k] for k in range(num_values))
            self._append(Drop(id=self.new_id(), calls=calls, values=values))
            for _ in calls:
                self._dead_calls.popleft()
            for _ in values:
                self._dead_values.popleft()

    def _send_missing(self) -> None:
        for outgoing in list(self._outbox):
            if all(number >= outgoing.number for number in self._sent):
                continue
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
        deadline = time.monotonic() + wait_s
        while self._outbox and not self._take_in():
            if failures(self._outbox):
                self._fail()
            self.group.receive(max(0.0, min(1.0, deadline - time.monotonic())), self._arrived)
            if not self._arrived and time.monotonic() >= deadline:
                if wait_s > 0:
                    raise WaitTimeout(self._describe_wait(what, wait_s))
                return

    def _take_in(self) -> bool:
        """Sort what has arrived; returns whether a message was thereby done by all ranks."""
        while self._arrived:
            self._take(self._arrived[0])
            del self._arrived[0]
        num_done = 0
        while self._outbox and len(self._outbox[0].replies) == self.group.size and not failures(self._outbox):
            self._acknowledge(self._outbox[0])
            num_done += 1
        return num_done > 0

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
        log, outbox = self._log.after(outgoing.entries), self._outbox[1:]
        counts = outgoing.entries[-1].counts if outgoing.entries else self._acknowledged
        steps = sum(isinstance(e.command, Step) for e in outgoing.entries) + self._steps_done
        if steps > self._steps_done:
            self._times.append((time.monotonic(), steps))
        self._log, self._outbox, self._acknowledged, self._steps_done = log, outbox, counts, steps

    # ---- failure

    def _fail(self) -> None:
        """A command failed: hear all ranks out, go back to the last commit, redo what stood before, and raise."""
        deadline = time.monotonic() + self.timeout_s
        self._send_missing()
        while any(len(o.replies) < self.group.size for o in self._outbox):
            self.group.receive(1.0, self._arrived)
            while self._arrived:
                self._take(self._arrived[0])
                del self._arrived[0]
            if time.monotonic() > deadline:
                raise WaitTimeout(self._describe_wait("all ranks to stop after a failure", self.timeout_s))
        number, rank, failure = failures(self._outbox)[0]
        exception = remote_exception.unpack(failure.exception, failure.text) if failure.exception else None
        if not failure.own or exception is None:
            exception = exception or CollectiveError(f"rank {rank}: {failure.text}")
            self.close(exception)
            raise exception
        if isinstance(exception, RemoteError) and exception.type_name == "KeyboardInterrupt":
            exception = KeyboardInterrupt()  # Ctrl-C while a command ran in this process
        self._go_back(decide(self._log, self._outbox, self._waiting(), number, self._acknowledged), exception)
        raise exception

    def _go_back(self, setback: Setback, exception: BaseException) -> None:
        """Deliver what stands, tell of what is gone, and open a new generation that begins with what is done again."""
        stand = {e.command.id for e in setback.stand}
        for outgoing in self._outbox:
            outgoing.deliver([e for e in outgoing.entries if e.command.id in stand], self.group.size)
        for entry in setback.gone:
            if entry.pending is not None and entry.pending.error is None:
                entry.pending.error = exception
        dropped = [e.command for e in setback.gone]
        if describe(dropped[1:]) and not isinstance(exception, TorchdlError):
            exception.add_note(f"recorded after it and not done: {describe(dropped[1:])}")
        for tell in self.on_drop:
            tell(tuple(dropped))
        counts, redo = setback.counts, setback.redo
        first: list[Command] = []
        if setback.source is not None:
            first.append(Copy(id=self.new_id(), source=setback.source))
        then: list[Command] = [Undo(id=self.new_id())] if redo.graphs() else []
        for model, names in setback.zeroed:
            then.append(ZeroGrad(id=self.new_id(), model=model, names=names, to_none=True))
        again = [Entry(c, counts) for c in first], redo.graphs(), [Entry(c, counts) for c in then], redo.local
        drops = [Entry(e.command, counts) for e in setback.drops]
        outbox = [Outgoing(1, tuple(itertools.chain(*again, drops)), True)]
        generation, sent, steps = self._generation + 1, [0] * self.group.size, self._steps_done + setback.num_steps
        self._generation, self._number, self._sent, self._outbox = generation, 1, sent, outbox
        self._log, self._recorded, self._acknowledged, self._steps_done = Log((), redo.waiting), [], counts, steps
        self._send_missing()

    def _lose(self, lost: Lost) -> None:
        """A worker process is gone: free the others and close."""
        where = self._current(lost.rank)
        error = WorkerLost(
            f"worker {lost.rank} (node {lost.node}, pid {lost.pid}) is lost at step {self._steps_done}{where}: "
            f"{lost.reason} The model is closed; build it again from its last state_dict."
        )
        self.group.stop(f"worker {lost.rank} is lost")
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
            self._log, self._recorded, self._outbox = Log(), [], []
            self.group.close()

"""What the stream keeps of a recorded command: the entry, its message, and who wants the answer.

Runs on the driver. Nothing crosses by itself.

Invariant: an entry holds its payload as handles, so it can be sent again at any time, bit for bit.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

import torch

from .program import Backward, Command, Drop, Forward, Kind, Reply, Step, Undo

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Sender(Protocol):
    """What an answer is waited for on: the stream."""

    def flush(self, drops: bool = True) -> None:
        """Send what was recorded."""

    def collect(self, what: str) -> None:
        """Take in at least one reply."""


class Pending:
    """What the ranks will answer to one recorded command."""

    __slots__ = ("__weakref__", "command", "error", "stream", "values")

    def __init__(self, stream: Sender, command: Command) -> None:
        self.stream, self.command = stream, command
        self.values: list[Any] | None = None
        self.error: BaseException | None = None

    def wait(self, what: str) -> list[Any]:
        """The answers by rank; flushes and waits where they are not there yet.

        Raises:
            WaitTimeout: no rank answered anything within the stream's `timeout_s`.
            the exception of the command, or of an earlier one.
        """
        while self.values is None and self.error is None:
            self.stream.flush(drops=False)
            if self.values is None and self.error is None:
                self.stream.collect(what)
        if self.error is not None:
            raise self.error
        assert self.values is not None
        return self.values


@dataclass(frozen=True, slots=True)
class Counts:
    """Where a stream stands after an entry.

    `version` counts optimizer steps, `ordinal` forwards since the last of them that may draw random numbers, `local`
    the local commands since the last commit; `trained` are the models that a training forward changed since then.
    """

    version: int = 0
    ordinal: int = 0
    local: int = 0
    trained: frozenset[int] = frozenset()

    def after(self, command: Command) -> Counts:
        """Where the stream stands when `command` was recorded as well."""
        if command.kind is Kind.COMMIT:
            is_step = isinstance(command, Step)
            return Counts(self.version + is_step, 0 if is_step else self.ordinal)
        if isinstance(command, Forward) and command.is_local:
            trained = self.trained | {command.model} if command.training else self.trained
            return Counts(self.version, self.ordinal + 1, self.local + 1, trained)
        if command.kind is Kind.LOCAL:
            return Counts(self.version, self.ordinal, self.local + 1, self.trained)
        return self


@dataclass(slots=True)
class Entry:
    """A recorded command, where the stream stands after it, each rank's data for it, and who wants the answer."""

    command: Command
    counts: Counts
    payload: Sequence[tuple[Any, ...]] | None = None
    wanted: weakref.ref[Pending] | None = None

    @property
    def pending(self) -> Pending | None:
        """Who waits for the answer, if anybody still does."""
        return self.wanted() if self.wanted is not None else None

    @property
    def is_local(self) -> bool:
        """Whether going back to the last commit means doing it again."""
        command = self.command
        if isinstance(command, Forward):
            return command.is_local
        return command.kind is Kind.LOCAL


@dataclass(frozen=True, slots=True)
class Log:
    """What all ranks did and may have to do again.

    `local` are the local commands since the last commit, with the drops of calls; `waiting` are the forwards before it
    whose graphs wait for a backward (a generator's, while the discriminator steps).
    """

    local: tuple[Entry, ...] = ()
    waiting: tuple[Entry, ...] = ()

    def after(self, entries: Sequence[Entry]) -> Log:
        """The log when `entries` were done as well."""
        local, waiting = list(self.local), list(self.waiting)
        for entry in entries:
            command = entry.command
            if command.kind is Kind.COMMIT:
                ended: set[int] = set()
                for done in (e.command for e in local):
                    if isinstance(done, Drop):
                        ended.update(done.calls)
                    elif isinstance(done, Backward) and not done.keep_graph:
                        ended.add(done.call)
                waiting = [e for e in (*waiting, *local) if _has_graph(e.command) and e.command.call not in ended]
                local = []
            elif isinstance(command, Undo):
                local = []  # what comes before it was done for its graph alone
            elif entry.is_local:
                local.append(entry)
            elif isinstance(command, Drop):
                known = {e.command.call for e in (*waiting, *local) if isinstance(e.command, Forward)}
                if known.intersection(command.calls):
                    local.append(entry)
        return Log(tuple(local), tuple(waiting))

    def graphs(self) -> tuple[Entry, ...]:
        """The waiting forwards that the local commands go back through."""
        own = {e.command.call for e in self.local if isinstance(e.command, Forward)}
        calls = {e.command.call for e in self.local if isinstance(e.command, Backward)} - own
        return tuple(e for e in self.waiting if isinstance(e.command, Forward) and e.command.call in calls)


def _has_graph(command: Command) -> TypeGuard[Forward]:
    return isinstance(command, Forward) and command.grad


@dataclass(slots=True)
class Outgoing:
    """A message that was made: its entries and the replies that came."""

    number: int
    entries: tuple[Entry, ...]
    resume: bool
    replies: dict[int, Reply] = field(default_factory=dict)

    def deliver(self, entries: Sequence[Entry], size: int) -> None:
        """Hand the answers to those who want them; `entries` are those of this message that stand."""
        results = {rank: dict(reply.results) for rank, reply in self.replies.items()}
        for entry in entries:
            pending = entry.pending
            if pending is not None and pending.values is None:
                pending.values = [results[rank].get(entry.command.id) for rank in range(size)]


@functools.cache
def _is_passed_over(filename: str) -> bool:
    return filename.startswith((PACKAGE, TORCH, "<frozen")) or "contextlib" in filename


def user_site() -> str:
    """The innermost line on the stack that belongs neither to this package nor to torch: `file:line in function`."""
    frame = sys._getframe(1)
    while True:
        name = frame.f_code.co_filename
        if not _is_passed_over(name):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        if frame.f_back is None:
            return ""
        frame = frame.f_back

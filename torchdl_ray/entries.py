"""What the stream keeps of a recorded command: the entry, its message, and who wants the answer.

Runs on the driver. Nothing crosses by itself.

Invariant: an entry holds its payload as handles, so it can be sent again at any time, bit for bit.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .program import Command, Drop, Forward, Kind, Reply

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Sender(Protocol):
    """What an answer is waited for on: the stream."""

    def flush(self) -> None:
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
            self.stream.flush()
            if self.values is None and self.error is None:
                self.stream.collect(what)
        if self.error is not None:
            raise self.error
        assert self.values is not None
        return self.values


@dataclass(slots=True)
class Entry:
    """A recorded command, each rank's data for it, and who wants the answer."""

    command: Command
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
        return command.kind is Kind.LOCAL or isinstance(command, Drop)


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


def user_site() -> str:
    """The innermost line on the stack that belongs neither to this package nor to torch: `file:line in function`."""
    frame = sys._getframe(1)
    while True:
        name = frame.f_code.co_filename
        if not name.startswith((PACKAGE, TORCH, "<frozen")) and "contextlib" not in name:
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        if frame.f_back is None:
            return ""
        frame = frame.f_back

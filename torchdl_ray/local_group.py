"""`LocalGroup`: workers in the driver's own process, without Ray.

Runs on the driver. With one worker (`num_workers=0`) a message is executed in the caller's thread, inside `send`, so
breakpoints and print statements in the model work. With more, each worker has a thread, and they take turns: one
computes while the others wait in a reduction or for a message. That is for tests and for debugging how a batch is cut;
it is not faster than one. Nothing crosses a process.

Invariant: the driver's own stream of random numbers is left alone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import CollectiveError
from .group import Lost, frozen
from .placement import Member
from .program import Message, Reply
from .worker import Worker

TIMEOUT_S = 60.0


class _Meeting:
    """Where the threads of a group exchange tensors: one list of contributions per operation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self.changed = threading.Condition()
        self.given: dict[int, dict[int, list[Tensor]]] = {}
        self.taken: dict[int, int] = {}
        self.waits: list[int] = []  # the operations that ranks wait for
        self.open = [0] * size  # by rank: messages on their way or under execution
        self.stopped = ""

    def is_still(self) -> bool:
        """Whether no rank can go on: each has nothing to do, or waits for a peer that has nothing to do."""
        return sum(map(bool, self.open)) == sum(len(self.given.get(number, {})) < self.size for number in self.waits)

    def give(self, number: int, rank: int, tensors: list[Tensor]) -> None:
        with self.changed:
            self.given.setdefault(number, {})[rank] = tensors
            self.changed.notify_all()

    def take(self, number: int) -> list[list[Tensor]]:
        """All contributions in rank order; the caller holds the turn and gives it away while it waits."""
        deadline = time.monotonic() + TIMEOUT_S
        self.turn.release()
        try:
            with self.changed:
                self.waits.append(number)
                self.changed.notify_all()
                while len(self.given.get(number, {})) < self.size and not self.stopped:
                    if not self.changed.wait(0.1) and time.monotonic() > deadline:
                        raise CollectiveError(
                            f"ranks {sorted(self.given.get(number, {}))} of {self.size} came in {TIMEOUT_S} s"
                        )
                if self.stopped:
                    raise CollectiveError(self.stopped)
                found = [self.given[number][r] for r in range(self.size)]
                self.taken[number] = self.taken.get(number, 0) + 1
                if self.taken[number] == self.size:
                    del self.given[number], self.taken[number]
                return found
        finally:
            with self.changed:
                self.waits.remove(number)
            self.turn.acquire()


class _Handle:
    def __init__(self, group: LocalCollective, number: int, targets: Sequence[Tensor]) -> None:
        self.group, self.number, self.targets = group, number, targets

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return len(self.group.meeting.given.get(self.number, {})) == self.group.size

    def wait(self) -> None:
        """Sum in rank order."""
        parts = self.group.meeting.take(self.number)
        for k, target in enumerate(self.targets):
            total = parts[0][k].clone()
            for part in parts[1:]:
                total += part[k]
            target.copy_(total)


class LocalCollective:
    """Reductions among the threads of a `LocalGroup`."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size, self.note = meeting, rank, meeting.size, ""
        self._number = 0

    def _start(self, tensors: Sequence[Tensor]) -> int:
        self._number += 1
        self.meeting.give(self._number, self.rank, [t.detach().clone() for t in tensors])
        return self._number

    def all_reduce(self, tensors: Sequence[Tensor]) -> _Handle:
        """See `collective.Collective`."""
        return _Handle(self, self._start(tensors), tensors)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `collective.Collective`."""
        return [part[0] for part in self.meeting.take(self._start([tensor]))]

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """See `collective.Collective`."""
        parts = self.meeting.take(self._start(tensors))
        for target, value in zip(tensors, parts[source], strict=True):
            target.detach().copy_(value)

    def barrier(self) -> None:
        """See `collective.Collective`."""
        self.meeting.take(self._start([]))

    def close(self) -> None:
        """See `collective.Collective`."""


@contextlib.contextmanager
def _unhooked() -> Iterator[None]:
    """Keeps hooks on saved tensors that the caller's thread has set (checkpointing) away from the model's own graph."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


class LocalGroup:
    """Workers in this process.

    Args:
        size: how many; more than one run in threads that take turns.
        device: where modules and batches live.
    """

    is_local = True

    def __init__(self, size: int = 1, device: torch.device | None = None) -> None:
        self.size = size
        self.device = device or torch.device("cpu")
        self.members = tuple(Member(r, "local", "local", os.getpid(), (), 1.0) for r in range(size))
        self.devices = (str(self.device),) * size
        self.workers = [Worker(r, size, self.device, "local") for r in range(size)]
        self._replies: list[Reply | Lost] = []
        self._came = threading.Condition()
        self._closed = False
        self._meeting = _Meeting(size)
        self._inbox: list[queue.Queue[tuple[Message, Mapping[int, Sequence[Any]]] | None]] = []
        if size > 1:
            for worker in self.workers:
                worker.join(LocalCollective(self._meeting, worker.state.rank))
                self._inbox.append(queue.Queue())
            for worker in self.workers:
                threading.Thread(
                    target=self._serve, args=(worker,), name=f"torchdl-{worker.state.rank}", daemon=True
                ).start()

    def put(self, data: Any) -> Any:
        """See `group.Group`."""
        return frozen(data)

    def send(self, rank: int, message: Message, payload: Mapping[int, Sequence[Any]]) -> None:
        """See `group.Group`; with one worker, executes the message."""
        state = torch.get_rng_state()
        try:
            self._start(rank, message, payload)
        finally:
            torch.set_rng_state(state)  # workers seed the process's generator

    def _start(self, rank: int, message: Message, payload: Mapping[int, Sequence[Any]]) -> None:
        if self._inbox:
            changed = self._meeting.changed
            with changed:
                self._meeting.open[rank] += 1
                self._inbox[rank].put((message, payload))
                while not self._meeting.is_still() and not self._meeting.stopped:
                    changed.wait(0.1)
        else:
            worker = self.workers[rank]
            try:
                reply = self._execute(worker, message, payload)
            except KeyboardInterrupt as stop:
                ended = worker.interrupted(message, stop)
                if ended is None:
                    raise
                reply = ended
            self._answer(reply)

    def _execute(self, worker: Worker, message: Message, payload: Mapping[int, Sequence[Any]]) -> Reply:
        with _unhooked():
            return worker.execute(message, payload)

    def _answer(self, reply: Reply | Lost) -> None:
        with self._came:
            self._replies.append(reply)
            self._came.notify_all()

    def _serve(self, worker: Worker) -> None:
        inbox = self._inbox[worker.state.rank]
        while (item := inbox.get()) is not None:
            try:
                with self._meeting.turn:
                    reply: Reply | Lost = self._execute(worker, *item)
            except BaseException as error:
                reply = Lost(
                    worker.state.rank, "local", os.getpid(), f"its thread failed outside of any command: {error!r}"
                )
            self._answer(reply)
            with self._meeting.changed:
                self._meeting.open[worker.state.rank] -= 1
                self._meeting.changed.notify_all()

    def receive(self, timeout_s: float, arrived: list[Reply | Lost]) -> None:
        """See `group.Group`."""
        with self._came:
            if not self._replies:
                self._came.wait(timeout_s)
            while self._replies:
                arrived.append(self._replies[0])
                del self._replies[0]

    def stop(self, reason: str) -> None:
        """See `group.Group`."""
        with self._meeting.changed:
            self._meeting.stopped = reason
            self._meeting.changed.notify_all()

    def close(self) -> None:
        """See `group.Group`."""
        if not self._closed:
            self._closed = True
            for inbox in self._inbox:
                inbox.put(None)
            self.stop("the group was closed")
            self.workers = []

"""`Worker`: a plain class that executes programs; knows torch, not Ray.

Runs on the worker, one per device. It takes one `Message` at a time with its rank's payload and answers with one
`Reply`.

Rules that it keeps (recovery rests on them):
* Messages are numbered. A double is ignored, a gap or an older generation is refused.
* `position` counts commits and only rises.
* After a failure it refuses everything until a message of a newer generation resumes it. Until its peers know, it still
  takes part in their reductions, with its failure flag set, so that nobody waits for it and nobody commits.
* Before a commit all ranks have agreed that they came to it without a failure.
* It is torn from the start of a commit to its end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import program, remote_exception
from .calls import Call, Calls
from .collective import Collective, Solo
from .errors import CollectiveError, StaleMessage
from .interpreter import Payload, State, execute
from .program import Backward, Command, Failure, Forward, Kind, Message, Reply, ZeroGrad
from .replica import PeerFailed, Replica, Stamp, agree
from .transfer import copy_state


class Worker:
    """One rank: a device, its models, and the commands that it has done.

    Args:
        rank: this worker's number, 0..size-1.
        size: how many workers there are.
        device: where modules and batches live.
        node: the node's name, for error messages.
    """

    def __init__(self, rank: int, size: int, device: torch.device, node: str = "") -> None:
        self.node = node
        self.position = 0
        self.version = 0  # optimizer steps among the commits
        self.generation = 0
        self._number = 0
        self._last: Reply | None = None
        self._current: Command | None = None
        self._results: list[tuple[int, Any]] = []
        self._failure: Failure | None = None
        self._informed = False  # whether the peers know of the failure, or need not
        self._unagreed = False  # whether a command since the last agreement may have failed on one rank alone
        self._torn = False
        self._reduction_ahead = False
        self._early: int | None = None  # the model whose sums begin before the next commit, on some ranks at least
        self.state = State(rank, size, device, Solo(), Calls(device))
        self.state.arm = self._arm

    def join(self, collective: Collective) -> None:
        """Use `collective` for all reductions from now on."""
        self.state.collective = collective

    def execute(self, message: Message, payload: Mapping[int, Payload]) -> Reply:
        """Do the commands of a message in order.

        Args:
            message: the program; numbers rise by one.
            payload: data of this rank by command id.
        Returns:
            results by command id, with the failure if there was one; never raises a user's exception.
        """
        start = time.perf_counter()
        refusal = self._refuse(message)
        if refusal is not None:
            return self._reply(message, [], refusal, start)
        if message.generation == self.generation and message.number <= self._number:
            last = self._last  # the driver may have lost the first answer, by Ctrl-C
            return last if last is not None and last.number == message.number else self._reply(message, [], None, start)
        self._number, self._last = message.number, None
        if message.resume:
            self._resume(message.generation)
        results: list[tuple[int, Any]] = []
        self._results = results
        for command, backward, ahead in plan(message.commands):
            self._current, self.state.fused, self.state.goes_back = command, backward, False
            self._reduction_ahead = ahead
            gradient = backward if backward is not None else command
            if ahead and isinstance(gradient, Backward) and gradient.full:
                self._early = gradient.model
            if self._failure is not None:
                self._attend(command, backward)
                continue
            try:
                value = self._do(command, payload.get(command.id, ()))
            except PeerFailed as failed:
                self._fail(command, own=False, text=f"rank {failed.ranks[0]} failed before")
            except CollectiveError as broken:
                self._fail(command, own=False, exception=broken)
            except BaseException as error:
                self._fail(command, own=True, exception=error)
            else:
                results.append((command.id, value))
        try:
            self._last = self._reply(message, results, self._failure, start)
        except Exception as error:  # an answer that cannot be made is a failure like any other
            ending = message.commands[-1]
            self._failure = self._failure or self._describe(ending.id, ending.site, own=True, exception=error)
            self._last = self._reply(message, [], self._failure, start)
        return self._last

    def interrupted(self, message: Message, exception: BaseException) -> Reply | None:
        """The reply to a message that Ctrl-C ended outside of a command (in the driver's own process only); None if it
        had not begun.
        """
        if (message.generation, message.number) != (self.generation, self._number):
            return None
        if self._last is None:
            command = self._current
            if self._failure is None:
                number, site = (command.id, command.site) if command is not None else (0, "")
                self._failure = self._describe(number, site, own=True, exception=exception)
            self._last = self._reply(message, self._results, self._failure, time.perf_counter())
        return self._last

    # ---- messages

    def _refuse(self, message: Message) -> Failure | None:
        is_new = message.generation > self.generation
        expected = 1 if is_new else self._number + 1
        if message.generation < self.generation or message.number > expected or is_new != message.resume:
            stale = StaleMessage(
                f"rank {self.state.rank} got message {message.number} of generation {message.generation} when it "
                f"expected number {expected} of generation {self.generation}"
            )
            return self._describe(0, "", own=True, exception=stale)
        return None

    def _resume(self, generation: int) -> None:
        self.generation = generation
        self._failure, self._informed, self._unagreed, self._early = None, False, False, None
        self.state.calls.links.clear()
        for replica in self.state.replicas.values():
            replica.undo()

    def _reply(self, message: Message, results: list[tuple[int, Any]], failure: Failure | None, start: float) -> Reply:
        found = tuple(
            (i, value.result() if isinstance(value, Call) else value) for i, value in results if value is not None
        )
        busy_s = time.perf_counter() - start
        return Reply(self.state.rank, message.generation, message.number, self.position, found, failure, busy_s)

    # ---- commands

    def _do(self, command: Command, payload: Payload) -> Any:
        if isinstance(command, program.Copy):
            self.position, self.version = copy_state(self.state, command.source, (self.position, self.version))
            self._torn = False
            return None
        if command.kind is not Kind.COMMIT:
            if not isinstance(command, program.Drop):
                self._unagreed = True
            value = execute(command, self.state, payload)
            # an answer that somebody waits for is made at once, so that what goes wrong with it is this command's
            # failure; one that nobody waits for is made at the end, because reading a number waits for the device
            is_awaited = isinstance(command, Forward) and command.expected is None
            return value.result() if is_awaited else value
        self._agree(command)
        self._torn = True
        result = execute(command, self.state, payload)
        for replica in self.state.replicas.values():
            replica.committed()
        self._torn = False
        self.position += 1
        self.version += isinstance(command, program.Step)
        return result

    def _stamp(self, command: Command) -> Stamp:
        return Stamp(self.generation, self.position, command.id)

    def _needs(self) -> list[Replica]:
        """The replicas with something to reduce; the same on all ranks. A commit takes everything along, so that what
        is equal at the last commit is equal at every one.
        """
        early = self.state.replicas.get(self._early) if self._early is not None else None
        found = [r for r in self.state.replicas.values() if r.buckets.pending or r.trained]
        return sorted(found, key=lambda r: r is not early)  # its sums may have begun: nothing may come before them

    def _agree(self, command: Command, failed: bool = False) -> None:
        collective, stamp = self.state.collective, self._stamp(command)
        replicas = self._needs()
        for replica in replicas:
            replica.reduce(collective, stamp, failed)
        if not replicas and self._unagreed:
            agree(collective, stamp, failed)
        self._unagreed, self._early = False, None

    def _attend(self, command: Command, backward: Backward | None) -> None:
        """Once failed, do of a command only what the peers' next reduction counts on, and tell them there."""
        if self._informed:
            return
        if isinstance(command, Forward) and command.training:
            self.state.replicas[command.model].trained = True
        gradient = backward if backward is not None else command
        if isinstance(gradient, program.AddGrad) or (isinstance(gradient, Backward) and gradient.full):
            self.state.replicas[gradient.model].buckets.pending = True
        if isinstance(command, ZeroGrad):
            execute(command, self.state, ())
        if command.kind is Kind.COMMIT:
            try:
                self._agree(command, failed=True)
            except (PeerFailed, CollectiveError):
                self._informed = True

    def _fail(self, command: Command, own: bool, text: str = "", exception: BaseException | None = None) -> None:
        guilty = self.state.fused if self.state.goes_back and self.state.fused is not None else command
        self._failure = self._describe(guilty.id, guilty.site, own, text, exception)
        self._informed = not own or self.state.collective.size == 1
        if self._torn:  # the peers have done the reduction of this commit, and so has this rank
            for replica in self.state.replicas.values():
                replica.trained = False
        if command.kind is not Kind.COMMIT:
            self._attend(command, self.state.fused)

    def _describe(
        self, command: int, site: str, own: bool, text: str = "", exception: BaseException | None = None
    ) -> Failure:
        body = b""
        if exception is not None:
            packed = remote_exception.pack(
                exception, rank=self.state.rank, node=self.node, step=self.version, site=site
            )
            body, text = packed.exception, packed.text
        return Failure(command, site, own, body, text, self._torn)

    def _arm(self, replica: Replica) -> None:
        """Called before the last backward of a call: let sums start by themselves if a reduction follows at once."""
        if self.state.collective.size > 1 and self._reduction_ahead:
            replica.buckets.arm(self.state.collective.all_reduce)


def plan(commands: Sequence[Command]) -> list[tuple[Command, Backward | None, bool]]:
    """The commands in the order of execution, each with the backward that is fused into it, and whether a commit
    follows with no other gradient in between, so that its sums may begin.

    A forward whose backward follows with constant seeds is fused with it: under `microbatch_size` only one piece's
    graph is then alive at a time. A zero_grad between the two is done first; a forward does not look at gradients.
    """
    order: list[tuple[Command, Backward | None]] = []
    rest = list(commands)
    while rest:
        command = rest.pop(0)
        backward = _fusible(command, rest) if isinstance(command, Forward) else None
        if backward is not None:
            end = rest.index(backward)
            order += [(c, None) for c in rest[:end]]
            del rest[: end + 1]
        order.append((command, backward))
    planned: list[tuple[Command, Backward | None, bool]] = []
    ahead = False
    for command, backward in reversed(order):
        planned.append((command, backward, ahead))
        ahead = ahead or command.kind is Kind.COMMIT
        touched = backward if backward is not None else command
        if isinstance(touched, Backward | ZeroGrad | program.AddGrad):
            ahead = False
    return planned[::-1]


def _fusible(forward: Forward, rest: Sequence[Command]) -> Backward | None:
    """The backward to fuse into `forward`, if only zero_grads stand between them and it needs no data."""
    for command in rest:
        if isinstance(command, ZeroGrad | program.Drop):
            continue
        if isinstance(command, Backward) and command.call == forward.call and not command.keep_graph and command.full:
            constant = all(isinstance(s.source, program.WireTensor) for s in command.seeds)
            return command if constant and not command.inputs and not command.links else None
        return None
    return None

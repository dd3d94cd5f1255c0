"""Reductions among workers of one node through one block of shared memory.

Runs on the workers, on CPUs, on x86 only: the counters are plain stores and rely on its order of stores.

What crosses: nothing but the block. Each rank has a slot in it. A reduction is three steps: a rank copies its tensors
into its slot and raises its counter `arrived`; when all have arrived it sums its own part of them over the slots, in
rank order, and raises `combined`; when all have combined it copies the sums back and raises `taken`. No step waits for
later work of the same rank, so operations are started one after the other while backward runs, and every start carries
the earlier ones on as far as the peers allow. A slot is a ring: its space is used again once all ranks have taken.

There is no thread: the copy runs at the start, the sum and the copy back in later starts or in `wait`. Two workers on
two cores, 8 buckets of 1 MB, each after 1.8 ms of computation: 14.5 ms without reduction, 15 to 19 this way, 20 to 45
with a thread per worker that does the same (it takes the core and the GIL from the computation), 27 to 29 through
Gloo. The price: a rank that computes for long without starting anything keeps its peers waiting for its part.

Invariant: the sum of an element is ((x0 + x1) + x2) + ... in rank order, in the tensor's own dtype, wherever it lies
in whichever bucket; the same as `process_group.py` gives on CPUs.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import CollectiveError
from .rendezvous import Watch
from .shared_block import LINE, WORDS_PER_RANK, Block, birth, round_up

_ARRIVED, _COMBINED, _TAKEN, _STATUS, _PID, _BORN = range(6)  # a rank's words in the block
_PRESENT, _LEFT, _FAILED = range(3)  # values of _STATUS


@dataclass(slots=True)
class _Piece:
    """A 1-D part of a tensor that fits a slot, and its offset in every slot."""

    flat: Tensor
    offset: int


@dataclass(slots=True)
class _Operation:
    combine: Callable[[], None] | None
    take: Callable[[], None] | None


class SharedHandle:
    """A reduction under way; see `SharedMemoryGroup.all_reduce`."""

    def __init__(self, group: SharedMemoryGroup, last: int, what: str, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._group = group
        self._last = last
        self._what = what
        self._copies = copies

    def done(self) -> bool:
        """Carry the reduction on as far as the peers allow without waiting; True if it is complete."""
        return self._group.progress(self._last)

    def wait(self) -> None:
        """Wait until the sums are in the tensors. Raises CollectiveError (peer lost, deadline, stop)."""
        self._group.finish(self._last, self._what)
        for target, flat in self._copies:
            target.copy_(flat.view(target.shape))
        self._copies = []


class SharedMemoryGroup:
    """A `Collective` over one `Block`; all ranks must start the same operations in the same order.

    Args:
        block: attached by all ranks of the group.
        rank: this process's number.
        watch: ends the waits.
    """

    def __init__(self, block: Block, rank: int, watch: Watch) -> None:
        self.rank = rank
        self.size = block.size
        self.note = ""
        self._block: Block | None = block
        self._watch = watch
        self._words = block.words
        self._slots = [torch.frombuffer(slot, dtype=torch.uint8) for slot in block.slots()]
        self._slot_bytes = block.slot_bytes
        self._failure = ""
        self._head = 0
        self._started = self._combined = self._taken = 0
        self._operations: dict[int, _Operation] = {}
        self._regions: deque[tuple[int, int, int]] = deque()  # (operation, begin, end) not yet taken by all ranks
        born = birth(os.getpid())
        self._set(_PID, os.getpid())
        self._set(_BORN, born if born is not None else 0)

    def all_reduce(self, tensors: Sequence[Tensor]) -> SharedHandle:
        """Start to sum each tensor in place over the ranks. The tensors must stay as they are until `wait` returns.

        Costs two copies and 1/size of the additions of all ranks, in this thread.
        """
        what = f"all_reduce of {_describe(tensors)}"
        flats, copies = _flatten(tensors)
        last = self._started - 1
        for pieces, size_bytes in self._pack(flats):
            begin = self._reserve(size_bytes, what)
            for piece in pieces:
                self._view(self.rank, begin, piece).copy_(piece.flat)
            combine, take = self._summation(begin, pieces)
            last = self._start(_Operation(combine, take))
        return SharedHandle(self, last, what, copies)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; equal shapes and dtypes on all. Blocks."""
        what = f"all_gather of {_describe([tensor])}"
        results = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(self.size)]
        outputs = [result.view(-1) for result in results]
        done = 0
        for pieces, size_bytes in self._pack([tensor.detach().contiguous().view(-1)]):
            begin = self._reserve(size_bytes, what)
            for piece in pieces:
                self._view(self.rank, begin, piece).copy_(piece.flat)

            def take(begin: int = begin, piece: _Piece = pieces[0], done: int = done) -> None:
                for rank, output in enumerate(outputs):
                    output[done : done + piece.flat.numel()].copy_(self._view(rank, begin, piece))

            self.finish(self._start(_Operation(None, take)), what)
            done += pieces[0].flat.numel()
        return results

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite the tensors on all ranks with those of rank `source`. Blocks."""
        what = f"broadcast of {_describe(tensors)} from rank {source}"
        flats, copies = _flatten(tensors)
        last = self._started - 1
        for pieces, size_bytes in self._pack(flats):
            begin = self._reserve(size_bytes, what)
            take = None
            if self.rank == source:
                for piece in pieces:
                    self._view(source, begin, piece).copy_(piece.flat)
            else:

                def take(begin: int = begin, pieces: list[_Piece] = pieces) -> None:
                    for piece in pieces:
                        piece.flat.copy_(self._view(source, begin, piece))

            last = self._start(_Operation(None, take))
        self.finish(last, what)
        if self.rank != source:
            for target, flat in copies:
                target.copy_(flat.view(target.shape))

    def barrier(self) -> None:
        """Return when all ranks have come here. Blocks."""
        self._check_usable()
        self.finish(self._start(_Operation(None, None)), "barrier")

    def close(self) -> None:
        """Leave: peers that still need this rank fail at once. Repeated calls do nothing."""
        if self._block is None:
            return
        if not self._failure:
            self._failure = "it was closed"
            self._set(_STATUS, _LEFT)
        self._operations.clear()
        self._slots = []
        block, self._block = self._block, None
        block.release()

    def progress(self, last: int) -> bool:
        """Do what can be done without waiting; True if operation `last` is complete on this rank."""
        if self._taken <= last:
            self._check_usable()
            self._pump()
        return self._taken > last

    def finish(self, last: int, what: str) -> None:
        """Wait for operation `last` and all before it."""
        if self._taken <= last:
            self._check_usable()
            self._await(_COMBINED, last, what)

    # Space in the slots

    def _pack(self, flats: list[Tensor]) -> list[tuple[list[_Piece], int]]:
        """Cut the tensors into operations of at most a quarter of a slot each, so that copies and sums overlap."""
        limit = self._slot_bytes // 4
        packs: list[tuple[list[_Piece], int]] = []
        pieces: list[_Piece] = []
        used = 0
        for flat in flats:
            for part in torch.split(flat, max(1, limit // flat.element_size())):
                size_bytes = round_up(part.numel() * part.element_size(), LINE)
                if pieces and used + size_bytes > limit:
                    packs.append((pieces, used))
                    pieces, used = [], 0
                pieces.append(_Piece(part, used))
                used += size_bytes
        if pieces:
            packs.append((pieces, used))
        return packs

    def _reserve(self, size_bytes: int, what: str) -> int:
        """Take the next space of the ring; waits until all ranks have taken what lay there. Alike on all ranks."""
        self._check_usable()
        begin = 0 if self._head + size_bytes > self._slot_bytes else self._head
        end = self._head = begin + size_bytes
        while any(begin < other_end and other_begin < end for _, other_begin, other_end in self._regions):
            self._await(_TAKEN, self._regions[0][0], what)
            self._regions.popleft()
        self._regions.append((self._started, begin, end))
        return begin

    def _view(self, rank: int, begin: int, piece: _Piece) -> Tensor:
        start = begin + piece.offset
        size_bytes = piece.flat.numel() * piece.flat.element_size()
        return self._slots[rank][start : start + size_bytes].view(piece.flat.dtype)

    # The three steps

    def _summation(self, begin: int, pieces: list[_Piece]) -> tuple[Callable[[], None], Callable[[], None]]:
        def combine() -> None:
            for piece in pieces:
                part = -(-piece.flat.numel() // self.size)
                own = slice(self.rank * part, (self.rank + 1) * part)
                total = self._view(0, begin, piece)[own]
                if total.numel():
                    for rank in range(1, self.size):
                        total.add_(self._view(rank, begin, piece)[own])

        def take() -> None:
            for piece in pieces:
                piece.flat.copy_(self._view(0, begin, piece))

        return combine, take

    def _start(self, operation: _Operation) -> int:
        number = self._started
        self._operations[number] = operation
        self._started = number + 1
        self._set(_ARRIVED, self._started)
        self._pump()
        return number

    def _pump(self) -> None:
        while self._combined < self._started and self._slowest(_ARRIVED) > self._combined:
            combine = self._operations[self._combined].combine
            if combine:
                combine()
            self._combined += 1
            self._set(_COMBINED, self._combined)
        while self._taken < self._combined and self._slowest(_COMBINED) > self._taken:
            take = self._operations.pop(self._taken).take
            if take:
                take()
            self._taken += 1
            self._set(_TAKEN, self._taken)

    def _await(self, word: int, number: int, what: str) -> None:
        """Wait until counter `word` of every rank has passed operation `number`, and this rank has taken it."""
        self._pump()
        wait = None
        turns = 0
        while self._slowest(word) <= number or self._taken <= number:
            wait = wait or self._watch.begin(what)
            try:
                if turns % 32 == 0 and wait.check(lambda: f"ranks {self._last_seen(word, number)} are late"):
                    self._check_peers(wait.error, word, number)
            except CollectiveError as error:
                self._fail(error)
                raise
            turns += 1
            if turns > 2000:
                time.sleep(0.0001)
            elif turns > 50:
                time.sleep(0)
            self._pump()

    # Peers

    def _check_peers(self, error: Callable[[str], CollectiveError], word: int, number: int) -> None:
        for rank in range(self.size):
            status = self._words[rank * WORDS_PER_RANK + _STATUS]
            if status == _FAILED:
                raise error(f"rank {rank} gave this group up")
        for rank in self._late(word, number):
            base = rank * WORDS_PER_RANK
            pid, born = self._words[base + _PID], self._words[base + _BORN]
            gone = bool(pid) and birth(pid) != born
            left = self._words[base + _STATUS] == _LEFT
            if (gone or left) and self._words[base + word] <= number:
                raise error(f"rank {rank} (process {pid}) {'left the group' if left else 'has died'}")

    def _late(self, word: int, number: int) -> list[int]:
        return [r for r in range(self.size) if self._words[r * WORDS_PER_RANK + word] <= number]

    def _last_seen(self, word: int, number: int) -> list[int]:
        """Those that keep the others waiting: who has not arrived, or else who has not passed `word`."""
        return self._late(_ARRIVED, number) or self._late(word, number)

    def _slowest(self, word: int) -> int:
        words = self._words
        return min(words[index] for index in range(word, self.size * WORDS_PER_RANK, WORDS_PER_RANK))

    def _set(self, word: int, value: int) -> None:
        self._words[self.rank * WORDS_PER_RANK + word] = value

    def _fail(self, error: CollectiveError) -> None:
        self._failure = str(error)
        self._set(_STATUS, _FAILED)

    def _check_usable(self) -> None:
        if self._failure:
            raise CollectiveError(f"{self._watch.where()} can not be used any more: {self._failure}. Join a new group")


def _flatten(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """1-D views of the tensors; where there is none, a copy, and (tensor, copy) to be copied back."""
    flats, copies = [], []
    for tensor in tensors:
        plain = tensor.detach()
        flat = plain.contiguous().view(-1)
        if flat.data_ptr() != plain.data_ptr():
            copies.append((plain, flat))
        flats.append(flat)
    return [flat for flat in flats if flat.numel()], copies


def _describe(tensors: Sequence[Tensor]) -> str:
    size_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return f"{len(tensors)} tensors, {size_bytes:,} bytes,"

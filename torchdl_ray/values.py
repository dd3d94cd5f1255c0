"""Values that lie on all workers alike: where each is, and the operations on them that wait to be recorded.

Runs on the driver. What crosses: one `Apply` per batch of operations; a `Drop` for values that nobody refers to.

Invariant: a value's number is dropped only after every operation that takes it was recorded.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from . import program
from .errors import UnsupportedError
from .operations import Local, Operation
from .stream import Stream

MAX_OPERATIONS = 1024  # that gather before they are recorded


class Owner(Protocol):
    """Whose gradients a value belongs to (see gradients.py)."""

    stream: Stream
    model: int
    epoch: int

    def fetch(self, cell: Cell) -> Tensor:
        """The value as a plain tensor, the same object until it changes on the workers."""

    def overwrite(self, cell: Cell, value: Tensor) -> None:
        """Put the driver's values in the place of a value on the workers."""

    def note(self, operation: Operation, cells: Sequence[Cell], leaves: Sequence[Tensor | None]) -> list[Cell | None]:
        """Record an operation on `cells`, whose results have the shapes of `leaves`; returns the new results' cells."""


class Kept:
    """The number of a value that the workers keep as long as this object lives."""

    __slots__ = ("__weakref__", "number", "stream")

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream, self.number = stream, number

    def __del__(self) -> None:
        self.stream.drop_value(self.number)


class Cell:
    """Where a value lies on the workers: it is the gradient `name`, or a result of operations.

    `base` is the gradient whose memory a result shares. `meta` has its shape and dtype, and counts changes. `cached` is
    the fetched value, with the owner's clock and the count of changes at that moment.
    """

    __slots__ = ("__weakref__", "base", "cached", "epoch", "index", "kept", "meta", "name", "owner")

    def __init__(self, owner: Owner, meta: Tensor, name: str | None, base: str | None) -> None:
        self.owner, self.meta, self.name, self.base = owner, meta, name, base
        self.kept: Kept | None = None
        self.index = -1  # among the results of the batch that is not recorded yet
        self.epoch = owner.epoch
        self.cached: tuple[Tensor, int, int] | None = None

    def mark(self) -> program.Gradient | program.Value | Local:
        """What stands for the value in an operation.

        Raises:
            UnsupportedError: the value was lost with commands that a failure took back.
        """
        if self.name is not None:
            return program.Gradient(self.owner.model, self.name)
        if self.epoch != self.owner.epoch or (self.index < 0 and self.kept is None):
            raise UnsupportedError(
                "this value was computed from gradients before a failure that took them back; compute it again"
            )
        return Local(self.index) if self.kept is None else program.Value(self.kept.number)


class Batch:
    """Operations that gather until something else needs them recorded."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._results: list[weakref.ref[Cell]] = []
        self._num_results = 0
        self._used: list[Kept] = []

    def append(
        self, operation: Operation, inputs: Sequence[Cell], outputs: Sequence[Cell | None], num_results: int
    ) -> None:
        """Add an operation whose arguments are marked already.

        Args:
            operation: what to do.
            inputs: the cells among its arguments.
            outputs: new cells for its results, None for a result that is no new value.
            num_results: how many leaves it returns.
        """
        self.operations.append(operation)
        self._used += [c.kept for c in inputs if c.kept is not None]
        for k, cell in enumerate(outputs):
            if cell is not None:
                cell.index, cell.kept, cell.epoch = self._num_results + k, None, cell.owner.epoch
                self._results.append(weakref.ref(cell))
        self._num_results += num_results

    def record(self, stream: Stream) -> bool:
        """Record what gathered; returns whether there was anything."""
        if not self.operations:
            return False
        kept = [cell for result in self._results if (cell := result()) is not None and cell.index >= 0]
        body = pickle.dumps((self.operations, [cell.index for cell in kept]))
        numbers = tuple(stream.new_id() for _ in kept)
        stream.record(program.Apply, body=body, outputs=numbers)
        for cell, number in zip(kept, numbers, strict=True):
            cell.kept, cell.index = Kept(stream, number), -1
        self.clear()
        return True

    def clear(self) -> None:
        """Forget what gathered."""
        self.operations, self._results, self._num_results, self._used = [], [], 0, []

"""Who gets which rows with what weight.

Runs on both sides; pure values, so a test needs neither torch nor Ray. Nothing of it crosses but `ShardData`, which the
driver fills from a `ShardPlan`.

Invariant: shards are contiguous, in the order of the ranks, and balanced; the weights of all pieces of a batch are
shares of the whole batch, so that gradients scaled by them are summed and never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Place:
    """What one rank is: its replica, the shard that it computes, and whether its reply counts for the shard."""

    rank: int
    replica: int
    shard: int
    replies: bool


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The rows start to stop of a batch that go to shard `index`.

    `pieces` are its forwards, (rows, share of the whole batch) each; a shard without rows has none.
    """

    index: int
    start: int
    stop: int
    pieces: tuple[tuple[int, float], ...]

    @property
    def rows(self) -> int:
        """The shard's number of rows."""
        return self.stop - self.start

    @property
    def weight(self) -> float:
        """The shard's share of the whole batch, in the interval [0, 1]."""
        return math.fsum(weight for _, weight in self.pieces)


@dataclass(frozen=True, slots=True)
class Layout:
    """Maps ranks to replicas and shards. Today each rank is a replica of its own and computes the shard of its number.

    Raises:
        ArgumentError: fewer than one replica.
    """

    num_replicas: int

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ArgumentError(f"num_replicas is {self.num_replicas}; at least 1 is needed.")

    @property
    def num_ranks(self) -> int:
        """How many workers there are."""
        return self.num_replicas

    def place(self, rank: int) -> Place:
        """What rank `rank` is; raises ArgumentError for a rank that does not exist."""
        if not 0 <= rank < self.num_ranks:
            raise ArgumentError(f"rank {rank} does not exist; there are the ranks 0 to {self.num_ranks - 1}.")
        return Place(rank, replica=rank, shard=rank, replies=True)

    def places(self) -> tuple[Place, ...]:
        """All ranks, in order."""
        return tuple(self.place(rank) for rank in range(self.num_ranks))

    def shards(
        self, rows: int, row_weights: Sequence[float] | None = None, microbatch_size: int | None = None
    ) -> tuple[ShardPlan, ...]:
        """Cut a batch of `rows` rows into one shard per replica; the last ones are empty where rows are few.

        Args:
            rows: the batch's number of rows, N.
            row_weights: the weight of each row (token counts, say), N of them, finite and not negative; None: 1 each.
                Where all are 0, so are all shares.
            microbatch_size: the most rows in one forward on a worker; None: a shard is one piece.

        Raises:
            ArgumentError: a negative number of rows, wrong weights, or a microbatch of no rows.
        """
        if rows < 0:
            raise ArgumentError(f"rows is {rows}; 0 or more are expected.")
        if microbatch_size is not None and microbatch_size < 1:
            raise ArgumentError(f"microbatch_size is {microbatch_size}; at least 1 row, or None, is expected.")
        weights = None if row_weights is None else _checked(row_weights, rows)
        total = float(rows) if weights is None else math.fsum(weights)
        return tuple(
            ShardPlan(index, part.start, part.stop, _pieces(part, weights, total, microbatch_size))
            for index, part in enumerate(slices(shard_sizes(rows, self.num_replicas)))
        )


def shard_sizes(rows: int, shards: int) -> tuple[int, ...]:
    """Balanced sizes, the larger ones first: 36 rows on 7 shards give 6, 5, 5, 5, 5, 5, 5.

    Raises:
        ArgumentError: fewer than one shard, or a negative number of rows.
    """
    if shards < 1 or rows < 0:
        raise ArgumentError(f"{rows} rows on {shards} shards; at least 0 rows and 1 shard are expected.")
    size, longer = divmod(rows, shards)
    return tuple(size + 1 if index < longer else size for index in range(shards))


def slices(sizes: Sequence[int]) -> tuple[slice, ...]:
    """Contiguous slices of these sizes, one after the other."""
    stops = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return tuple(slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True))


def _pieces(
    part: slice, weights: tuple[float, ...] | None, total: float, microbatch_size: int | None
) -> tuple[tuple[int, float], ...]:
    rows = part.stop - part.start
    if rows == 0:
        return ()
    sizes = shard_sizes(rows, 1 if microbatch_size is None else -(-rows // microbatch_size))
    if weights is None:
        return tuple((size, size / total) for size in sizes)
    found = []
    for piece in slices(sizes):
        share = math.fsum(weights[part.start + piece.start : part.start + piece.stop])
        found.append((piece.stop - piece.start, share / total if total > 0 else 0.0))
    return tuple(found)


def _checked(row_weights: Sequence[float], rows: int) -> tuple[float, ...]:
    weights = tuple(float(weight) for weight in row_weights)
    if len(weights) != rows:
        raise ArgumentError(f"there are {len(weights)} row weights for {rows} rows; one per row is expected.")
    for row, weight in enumerate(weights):
        if not (weight >= 0 and math.isfinite(weight)):
            raise ArgumentError(f"the weight of row {row} is {weight}; a finite number of 0 or more is expected.")
    if not math.isfinite(sum(weights)):
        raise ArgumentError("the row weights add up to infinity; scale them down.")
    return weights

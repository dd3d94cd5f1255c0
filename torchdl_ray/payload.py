"""What commands carry and what answers them: tensors on their way, marks that stand for tensors, structures, keys.

Runs on both sides; frozen values, nothing crosses but as a part of program.py's messages.

Invariant: everything here pickles, and small values compare by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Number = int | float | bool | complex


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A tensor as it travels: contiguous numpy bytes, and the dtype that numpy may not know (bf16, complex32, ...)."""

    array: np.ndarray[Any, Any]
    dtype: str
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:  # a dataclass's own way takes several times as long
        return WireTensor, (self.array, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Cut:
    """Marks a leaf of the arguments that is cut: number `index` of the rank's own arrays."""

    index: int


@dataclass(frozen=True, slots=True)
class Same:
    """Marks a leaf of the arguments that all ranks get alike: number `index` of the common arrays."""

    index: int


@dataclass(frozen=True, slots=True)
class Remote:
    """Marks a leaf of the arguments that lies on the workers already: output `leaf` of call `call`."""

    call: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Value:
    """Refers to a value that lies on all workers alike (see `Apply`), by its number."""

    id: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """Refers to the reduced gradient of the parameter `name` of model `model`."""

    model: int
    name: str


@dataclass(frozen=True, slots=True)
class LeafKind:
    """What is known of one output leaf before its value. `tensor` False means any other Python object, whose `dtype` is
    "None" or "object".
    """

    tensor: bool
    dtype: str = ""
    ndim: int = -1
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Structure:
    """Which containers and which leaves a call returned; `spec` is hashable and made by `tree.flatten`."""

    spec: Any
    leaves: tuple[LeafKind, ...]


@dataclass(frozen=True, slots=True)
class RandomKey:
    """Names one stream of random numbers, equal in every replay (see `seed_of` in worker.py)."""

    seed: int
    version: int
    ordinal: int

    def __reduce__(self) -> tuple[Any, ...]:
        return RandomKey, (self.seed, self.version, self.ordinal)


@dataclass(frozen=True, slots=True)
class Autocast:
    """The driver's autocast state at a call; device types are replaced by the worker's own."""

    enabled: bool
    dtype: str
    cache: bool = True


@dataclass(frozen=True, slots=True)
class ShardData:
    """One rank's part of a call's inputs.

    `rows` is its number of rows (0: the rank takes part without running the module), `weight` its share of the whole
    batch, in the interval [0, 1], `index` its place in the batch; `pieces` are the rows of each forward on the worker
    (more than one under `microbatch_size`) with the share of each in the whole batch. `arrays` hold the cut leaves, as
    `wire.pack` makes them.
    """

    index: int
    rows: int
    pieces: tuple[tuple[int, float], ...]
    arrays: tuple[WireTensor, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardData, (self.index, self.rows, self.pieces, self.arrays)

    @property
    def weight(self) -> float:
        """This shard's share of the whole batch."""
        return sum(weight for _, weight in self.pieces)


@dataclass(frozen=True, slots=True)
class Seed:
    """A gradient that enters a call's graph at output `leaf`.

    `source` is a number or 0-dim tensor (all ranks alike; scaled by the piece's weight where `weighted`), the index of
    a cut array in the rank's data, or a `Link` to a gradient that another call's backward left on the worker.
    """

    leaf: int
    source: WireTensor | Cut | Link
    weighted: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Seed, (self.leaf, self.source, self.weighted)


@dataclass(frozen=True, slots=True)
class Link:
    """The gradient that backward `command` of a later call left for its input number `index`."""

    command: int
    index: int


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a worker tells of a call unasked.

    `structure` and `shapes` are None where the expected structure was met. `scalars` are the 0-dim tensor outputs,
    (leaf, value). `objects` are the outputs that are no tensors, as a pickle of {leaf: object}. `ran` is False where
    the rank had no rows.
    """

    ran: bool
    structure: Structure | None = None
    shapes: tuple[tuple[int, ...] | None, ...] | None = None
    scalars: tuple[tuple[int, Number], ...] = ()
    objects: bytes = b""

    def __reduce__(self) -> tuple[Any, ...]:
        return CallResult, (self.ran, self.structure, self.shapes, self.scalars, self.objects)

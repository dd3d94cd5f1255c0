"""`Answer`: what the ranks told of a call unasked, and how their parts become one value.

Runs on the driver. 0-dim outputs come home with the call's reply, so their values outlive the call: a list of losses
keeps numbers, and nothing on the workers.

Invariant: an answer refers to no call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import tree
from .entries import Pending
from .errors import GatherError
from .program import CallResult, Forward, LeafKind, Number, Structure
from .reading import Reading


@dataclass(eq=False)
class Answer:
    """The reply to one call.

    Args:
        pending: the ranks' `CallResult`s.
        sizes, weights: rows and share of the whole batch by rank.
        device: where values come to.
    """

    pending: Pending
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    device: torch.device
    structure: Structure | None = None
    reading: Reading | None = None

    def kind(self, leaf: int) -> LeafKind:
        """What is known of a leaf without waiting."""
        assert self.structure is not None
        return self.structure.leaves[leaf]

    def dim(self, leaf: int) -> int:
        """Along which dimension a leaf has its rows."""
        assert self.reading is not None
        return self.reading.dims[leaf]

    def ranks(self) -> list[int]:
        """The ranks that had rows."""
        return [r for r, size in enumerate(self.sizes) if size]

    @property
    def told_shapes(self) -> bool:
        """Whether the workers tell the shapes unasked: only where nothing was expected."""
        command = self.pending.command
        return not isinstance(command, Forward) or command.expected is None

    def results(self) -> list[CallResult]:
        """What the ranks that had rows told of the call; waits for it."""
        found = self.pending.wait("a call of the model")
        return [found[r] for r in self.ranks()]

    def is_known(self, leaf: int) -> bool:
        """See `scalar.Numbers`."""
        return self.pending.values is not None

    def number(self, leaf: int) -> Tensor:
        """See `scalar.Numbers`."""
        return self.joined(leaf, self.parts(leaf))

    def parts(self, leaf: int) -> list[Tensor]:
        """A 0-dim leaf on each rank that had rows."""
        return [self.scalar(self.kind(leaf), dict(result.scalars)[leaf]) for result in self.results()]

    def scalar(self, kind: LeafKind, value: Number) -> Tensor:
        """A number as the 0-dim tensor that it was."""
        return torch.tensor(value, dtype=getattr(torch, kind.dtype), device=self.device)

    def joined(self, leaf: int, parts: Sequence[Tensor]) -> Tensor:
        """One value of those of the ranks that had rows.

        Raises:
            GatherError: they are no rows, no 0-dim floats, and nobody told how to read them.
        """
        assert self.reading is not None
        assert self.structure is not None
        ranks = self.ranks()
        sizes, weights = [self.sizes[r] for r in ranks], [self.weights[r] for r in ranks]
        path = tree.paths(self.structure.spec, "output")[leaf]
        reduction = self.reading.reduction[leaf]
        if self.kind(leaf).ndim == 0 and not reduction and len(parts) > 1:
            raise GatherError(
                f"{path} is a 0-dim {parts[0].dtype} on each of {len(parts)} replicas "
                f"({', '.join(str(p.item()) for p in parts[:4])}); say how it is read by reduction={{...: 'sum'}} (or "
                "'mean') when the model is wrapped, or look at .shards"
            )
        joined: Tensor = tree.join_leaf(parts, sizes, weights, self.reading.dims[leaf], reduction != "sum", path)
        return joined

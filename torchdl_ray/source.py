"""`Source`: what a RemoteTensor asks for its values; a call of the model, or an answer of the workers.

Runs on the driver; an interface, nothing crosses by itself.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .program import LeafKind
from .scalar import Numbers


class Source(Protocol):
    """The call that an output leaf comes from (see remote_call.py)."""

    id: int

    def kind(self, leaf: int) -> LeafKind:
        """What is known of the leaf without waiting."""

    def shape(self, leaf: int) -> torch.Size:
        """The joined shape; may wait for metadata, never for values."""

    def numbers(self) -> Numbers:
        """The values of 0-dim leaves, which outlive the call."""

    def watch(self, leaf: int) -> None:
        """Somebody wants to see the gradient of the leaf's joined value on the driver."""

    def backward_from(self, leaf: int, keep_graph: bool) -> bool:
        """Run the backward of a 0-dim leaf without the driver's engine; False where that would leave something out."""

    def fetch(self, leaf: int, token: Tensor | None) -> Tensor:
        """The joined value, with the graph attached where there is one."""

    def stand_in(self, leaf: int, token: Tensor) -> Tensor:
        """A 0-dim tensor on the driver whose gradient is the leaf's."""

    def shards(self, leaf: int, token: Tensor | None) -> list[Tensor]:
        """The values of each replica that had rows, with the graph attached."""

    def rows(self) -> int:
        """The number of rows of the whole batch."""

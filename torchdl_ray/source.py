"""`Source`: what a RemoteTensor asks for its values; a call of the model, or an answer of the workers.

Runs on the driver; an interface, nothing crosses by itself.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .program import LeafKind


class Source(Protocol):
    """The call that an output leaf comes from (see remote_call.py)."""

    id: int

    def kind(self, leaf: int) -> LeafKind:
        """What is known of the leaf without waiting."""

    def shape(self, leaf: int) -> torch.Size:
        """The joined shape; may wait for metadata, never for values."""

    def is_known(self, leaf: int) -> bool:
        """Whether the value is here already, so that reading it neither waits nor sends."""

    def fetch(self, leaf: int, token: Tensor | None) -> Tensor:
        """The joined value, with the graph attached where there is one."""

    def stand_in(self, leaf: int, token: Tensor) -> Tensor:
        """A 0-dim tensor on the driver whose gradient is the leaf's."""

    def shards(self, leaf: int, token: Tensor | None) -> list[Tensor]:
        """The values of each replica that had rows, with the graph attached."""

    def rows(self) -> int:
        """The number of rows of the whole batch."""

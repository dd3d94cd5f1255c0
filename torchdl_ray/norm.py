"""`Norm`: a number that all replicas answer alike, as the source of a RemoteTensor.

Runs on the driver. The number comes home with the reply to its command; looking at it waits for that and sends nothing.

Invariant: it has no graph, as the norm that `torch.nn.utils.clip_grad_norm_` returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .entries import Pending
from .program import LeafKind


class Norm:
    """See `source.Source`; there is one leaf, a 0-dim float32."""

    def __init__(self, pending: Pending) -> None:
        self.id, self.pending = 0, pending

    def kind(self, leaf: int) -> LeafKind:
        """See `source.Source`."""
        return LeafKind(True, "float32", 0)

    def shape(self, leaf: int) -> torch.Size:
        """See `source.Source`."""
        return torch.Size(())

    def is_known(self, leaf: int) -> bool:
        """Whether the number is here already."""
        return self.pending.values is not None

    def numbers(self) -> Norm:
        """See `source.Source`."""
        return self

    def watch(self, leaf: int) -> None:
        """See `source.Source`; there is no gradient to see."""

    def number(self, leaf: int) -> Tensor:
        """The value; waits for it."""
        return torch.tensor(self.pending.wait("the gradients' norm")[0], dtype=torch.float32)

    def stand_in(self, leaf: int, token: Tensor) -> Tensor:
        """See `source.Source`."""
        return torch.zeros(())

    def backward_from(self, leaf: int, keep_graph: bool) -> bool:
        """See `remote_tensor.Source`: a norm has no graph."""
        return False

    def fetch(self, leaf: int, token: Tensor | None) -> Tensor:
        """See `source.Source`."""
        return self.number(leaf)

    def shards(self, leaf: int, token: Tensor | None) -> list[Tensor]:
        """See `source.Source`."""
        return [self.number(leaf)]

    def rows(self) -> int:
        """See `source.Source`."""
        return 0

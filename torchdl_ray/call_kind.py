"""What is known of one kind of call: the structure of its output, and whether it can be counted on.

Runs on the driver; nothing crosses. A kind is a method under one set of module modes and one form of inputs; shapes and
floats do not matter (`signature`).

Invariant: a kind that ever varied is never trusted again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from .program import Structure
from .remote_tensor import RemoteTensor

TRUSTED_AFTER = 3


@dataclass
class Kind:
    """What is known of one kind of call."""

    structure: Structure | None = None
    joinable: tuple[bool, ...] = ()
    met: int = 0
    varied: bool = False
    row_list: bool = False  # it returned a list with one entry per row
    columns: bool = False  # it returned as many leaves for other numbers of rows
    rows: int = 0  # of the last call

    def meet(self, structure: Structure, joinable: tuple[bool, ...], rows: int) -> None:
        """Take in what one call of so many rows returned."""
        self.rows = rows
        if self.structure is not None and (structure != self.structure or joinable != self.joinable):
            self.varied = True
        self.structure, self.joinable = structure, joinable
        self.met += 1

    @property
    def trusted(self) -> Structure | None:
        """The structure to count on, if any."""
        known = self.structure
        if known is None or self.varied or self.met < TRUSTED_AFTER:
            return None
        return None if any(not k.tensor and k.dtype != "None" for k in known.leaves) else known


def signature(leaf: Any, kind: str, grad: bool) -> Any:
    """What of an input the output's structure may depend on: None, bools, strings and small ints by value; of tensors
    and arrays the dtype, the number of dimensions, and whether they require grad.
    """
    if isinstance(leaf, RemoteTensor):
        found = leaf.source()
        return kind, leaf.dtype, leaf.known_ndim(), grad and found is not None and found[2]
    if isinstance(leaf, Tensor):
        return kind, leaf.dtype, leaf.ndim, grad and leaf.requires_grad
    if isinstance(leaf, np.ndarray):
        return kind, leaf.dtype.str, leaf.ndim
    if kind != "object":
        return kind
    if leaf is None or isinstance(leaf, bool | str):
        return leaf, type(leaf)
    if isinstance(leaf, int) and abs(leaf) < 1024:
        return leaf, int
    return type(leaf)

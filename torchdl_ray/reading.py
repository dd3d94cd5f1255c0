"""How the replicas' outputs become one value: which reduction and which dimension each output leaf has.

Runs on both sides: the driver joins replicas by it, a worker the microbatches of its shard. Pure values; nothing
crosses but the two arguments, in each `Forward`.

Invariant: both sides read a structure alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .containers import paths
from .program import LeafKind, Structure

Told = str | tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """For each leaf: its reduction where it is 0-dim ("mean", "sum", or "" where nobody told), and the dimension of its
    rows.
    """

    reduction: tuple[str, ...]
    dims: tuple[int, ...]


def told(argument: Any) -> Any:
    """An argument of DataParallel as it travels: a mapping by leaf name becomes pairs."""
    return tuple((str(k), v) for k, v in argument.items()) if isinstance(argument, Mapping) else argument


def read(structure: Structure, reduction: Told, out_dims: Any, dim: int) -> Reading:
    """How to read a structure.

    Args:
        reduction: "mean" or "sum" for all 0-dim floats, or pairs (leaf name, reduction), the others being means.
        out_dims: None (rows along `dim`), one dimension for all, or pairs (leaf name, dimension).
        dim: the dimension of the inputs' rows.
    """
    names = leaf_names(structure)
    reductions = tuple(_reduction(reduction, n, k) for n, k in zip(names, structure.leaves, strict=True))
    if isinstance(out_dims, tuple):
        dims = tuple(_lookup(out_dims, name, dim) for name in names)
    else:
        dims = (dim if out_dims is None else out_dims,) * len(names)
    return Reading(reductions, dims)


def leaf_names(structure: Structure) -> list[str]:
    """The leaves' names for `reduction` and `out_dims`: `loss`, `1`, `heads.0`."""
    found = paths(structure.spec, ".")
    return [p.replace("']", "").replace("['", ".").replace("[", ".").replace("]", "").strip(".") for p in found]


def _lookup(given: tuple[tuple[str, Any], ...], name: str, default: Any) -> Any:
    return next((value for key, value in given if key == name), default)


def _reduction(given: Told, name: str, kind: LeafKind) -> str:
    default = "mean" if not kind.tensor or _has_mean(kind) else ""
    if isinstance(given, tuple):
        return str(_lookup(given, name, default))
    return "sum" if given == "sum" else default


def _has_mean(kind: LeafKind) -> bool:
    dtype: torch.dtype = getattr(torch, kind.dtype)
    return dtype.is_floating_point or dtype.is_complex

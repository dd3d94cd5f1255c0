"""Cut, join and move nested batches.

Runs on both sides. The driver plans a call's inputs (`plan`), cuts them into shards and packs each leaf (`to_wire`,
`pack`); a worker unpacks them and joins the outputs of its microbatches (`join_pieces`); the driver joins those of the
replicas (`join_leaf`, `gather`). `scatter`, `gather` and `replicate` are public.

What crosses between processes: `WireTensor`s (contiguous numpy arrays, which Ray shares without a copy) and `Spec`s.

Invariant: a leaf is cut or joined along `dim` only where its size there is the number of rows; everything else travels
whole, is equal on all shards, or raises an error with the leaf's path and the sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from .containers import Replicated, Spec, collapse, flatten, paths, replicate, unflatten, walk
from .errors import ArgumentError, GatherError, ScatterError
from .wire import check_sendable, from_wire, pack, to_wire, unpack

__all__ = ["Plan", "Replicated", "Spec", "cut", "flatten", "from_wire", "gather", "join_leaf", "join_pieces", "joins"]
__all__ += ["check_sendable", "pack", "paths", "plan", "replicate", "scatter", "to_wire", "unflatten", "unpack"]

LeafRole = Literal["cut", "list_cut", "remote", "same_tensor", "object"]


@dataclass(frozen=True)
class Plan:
    """How the inputs of a call are cut: one entry of `leaves` and `kind` per leaf of `spec`.

    `kind` says "cut" (tensor or array, along `dim`), "list_cut" (a list with an entry per row), "remote" (rows that lie
    on the workers), "same_tensor" (tensor or array that goes whole) or "object". `rows` is 0 where nothing has rows.
    """

    rows: int
    dim: int
    leaves: list[Any]
    kind: tuple[LeafRole, ...]
    spec: Spec
    roots: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """The path of every leaf: `args[0]['x']`, `kwargs['mask']`."""
        return _rooted(self.spec, self.roots)

    def cut(self, leaf: int, start: int, stop: int) -> Any:
        """Rows start to stop of leaf number `leaf`, as a view; the leaf itself where it is not cut."""
        return cut(self.leaves[leaf], start, stop, self.dim) if self.kind[leaf] in _CUT else self.leaves[leaf]


_CUT: tuple[LeafRole, ...] = ("cut", "list_cut")


def plan(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dim: int = 0,
    *,
    is_remote: Callable[[Any], int | None] | None = None,
    require_rows: bool = True,
) -> Plan:
    """Find the rows of a call's inputs and say of every leaf how it travels. Looks at shapes, never at values.

    Args:
        args, kwargs: the call's arguments; tensors and arrays with ndim > dim have rows along `dim`.
        is_remote: the number of rows of a value that lies on the workers, None for anything else.
        require_rows: raise where nothing has rows.

    Raises:
        ScatterError: unequal numbers of rows, no rows, or nothing that has rows.
    """
    return _plan((tuple(args), dict(kwargs)), dim, ("args", "kwargs"), is_remote, require_rows)


def cut(value: Any, start: int, stop: int, dim: int = 0) -> Any:
    """Rows start to stop of a tensor or array (along `dim`) or of a list or tuple, as a view where there is one."""
    if isinstance(value, torch.Tensor):
        return value.narrow(dim, start, stop - start)
    if isinstance(value, np.ndarray):
        return value[(slice(None),) * dim + (slice(start, stop),)]
    return value[start:stop]


def scatter(tree: Any, num_shards: int, dim: int = 0, *, require_rows: bool = True) -> list[Any]:
    """Cut a batch into `num_shards` balanced, contiguous shards (36 rows on 7: 6, 5, 5, 5, 5, 5, 5), as views.

    Tensors and arrays with ndim > dim are cut along `dim`; a list or tuple of plain objects with one entry per row is
    cut with them; numbers, strings, None, 0-dim tensors and what `replicate` marks go to every shard whole. With fewer
    rows than shards, the last shards have none. Costs no message and no copy, and is differentiable.

    Args:
        tree: any nesting of tensors, arrays and other objects.
        num_shards: how many shards to return, at least 1.
        dim: the dimension of the rows.
        require_rows: raise where nothing has rows; False hands the tree to all shards whole.

    Raises:
        ScatterError: unequal numbers of rows (names both), an empty batch, or nothing that has rows.
    """
    if num_shards < 1:
        raise ScatterError(f"num_shards is {num_shards}; at least 1 shard is needed.")
    found = _plan(tree, dim, ("inputs",), None, require_rows)
    size, longer = divmod(found.rows, num_shards)
    starts = [size * index + min(index, longer) for index in range(num_shards + 1)]
    return [
        unflatten(found.spec, [found.cut(leaf, start, stop) for leaf in range(len(found.leaves))])
        for start, stop in itertools.pairwise(starts)
    ]


def _plan(
    tree: Any, dim: int, roots: tuple[str, ...], is_remote: Callable[[Any], int | None] | None, require_rows: bool
) -> Plan:
    _check_dim(dim)
    leaves: list[Any] = []
    whole: list[bool] = []
    spec = walk(tree, is_remote and (lambda value: is_remote(value) is not None), leaves, whole, False)
    remote = [is_remote(leaf) if is_remote and not kept else None for leaf, kept in zip(leaves, whole, strict=True)]
    rows = [
        _rows(leaf, dim) if number is None and not kept else number
        for leaf, number, kept in zip(leaves, remote, whole, strict=True)
    ]
    total = _agreed_rows(rows, leaves, spec, dim, roots, require_rows)
    if any(number is not None for number in rows):
        leaves, whole, spec = _collapse_inputs(spec, leaves, whole, total, len(roots) > 1)
    roles = tuple(_role(leaf, kept, dim, is_remote) for leaf, kept in zip(leaves, whole, strict=True))
    return Plan(total, dim, leaves, roles, spec, roots)


def _collapse_inputs(
    spec: Spec, leaves: list[Any], whole: list[bool], rows: int, calls: bool
) -> tuple[list[Any], list[bool], Spec]:
    """Make lists with an entry per row single leaves; the tuple of a call's arguments is no such list."""
    values, flags = iter(leaves), iter(whole)
    if not calls:
        return collapse(spec, values, flags, rows, False)
    parts = [collapse(child, values, flags, rows, True) for child in spec.children]
    joined = dataclasses.replace(spec, children=tuple(part[2] for part in parts))
    return [leaf for part in parts for leaf in part[0]], [flag for part in parts for flag in part[1]], joined


def _role(leaf: Any, kept: bool, dim: int, is_remote: Callable[[Any], int | None] | None) -> LeafRole:
    if is_remote and is_remote(leaf) is not None:
        return "remote"
    if isinstance(leaf, list | tuple) and not kept and not isinstance(leaf, torch.Size):
        return "list_cut"
    if not isinstance(leaf, torch.Tensor | np.ndarray):
        return "object"
    return "same_tensor" if kept or _rows(leaf, dim) is None else "cut"


def _rows(leaf: Any, dim: int) -> int | None:
    if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > dim:
        return int(leaf.shape[dim])
    return None


def _agreed_rows(
    rows: list[int | None], leaves: list[Any], spec: Spec, dim: int, roots: tuple[str, ...], require_rows: bool
) -> int:
    """The one number of rows that all leaves with rows have (0 where no leaf has rows), or an error."""
    having = [index for index, number in enumerate(rows) if number is not None]
    if not having:
        if require_rows:
            raise ScatterError(
                f"nothing to cut: no tensor or array with more than {dim} dimensions among {len(leaves)} values "
                f"({', '.join(_rooted(spec, roots)[:4]) or 'no arguments'}). Pass at least one tensor with rows along "
                f"dim {dim}; a value that all workers get whole is marked by replicate(x)."
            )
        return 0
    first = having[0]
    for index in having:
        if rows[index] != rows[first]:
            names = _rooted(spec, roots)
            raise ScatterError(
                f"{names[index]} has {rows[index]} rows along dim {dim}{_shape(leaves[index])}, but {names[first]} has "
                f"{rows[first]}{_shape(leaves[first])}. All tensors that are cut need the same number of rows; mark "
                f"one that every worker shall get whole with replicate(x)."
            )
    if rows[first] == 0:
        raise ScatterError(
            f"the batch is empty: {_rooted(spec, roots)[first]} has no rows along dim {dim}{_shape(leaves[first])}. "
            "At least one row is needed; skip empty batches."
        )
    return rows[first] or 0


def _shape(leaf: Any) -> str:
    known = isinstance(leaf, np.ndarray) or type(leaf) in (torch.Tensor, torch.nn.Parameter)
    return f" (shape {list(leaf.shape)})" if known else ""


def _rooted(spec: Spec, roots: tuple[str, ...]) -> list[str]:
    if len(roots) == 1:
        return paths(spec, roots[0])
    return [path for root, child in zip(roots, spec.children, strict=True) for path in paths(child, root)]


def _check_dim(dim: int) -> None:
    if dim < 0:
        raise ArgumentError(f"dim is {dim}; rows are counted from the front, so dim has to be 0 or more.")


def joins(shapes: Sequence[Sequence[int]], rows: Sequence[int], dim: int = 0) -> bool:
    """True if tensors of these shapes, one per shard, are rows that join along `dim` (0-dim tensors do not join).

    Args:
        shapes: the tensor's shape on each shard.
        rows: each shard's number of rows.
    """
    if not shapes or any(len(shape) <= dim for shape in shapes):
        return False
    rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    return len(rest) == 1 and all(shape[dim] == number for shape, number in zip(shapes, rows, strict=True))


def join_leaf(
    values: Sequence[Any],
    rows: Sequence[int],
    weights: Sequence[float],
    dim: int = 0,
    mean: bool = True,
    path: str = "the output",
) -> Any:
    """Join one leaf of the shards' outputs, differentiably.

    Args:
        values: the leaf on each shard; one value is returned as it is.
        rows: each shard's number of rows.
        weights: each shard's weight in a mean; a shard that weighs nothing is left out, so that its NaN is too.
        mean: read 0-dim floats as the weighted mean; False: as the sum (of integers as well).

    Raises:
        GatherError: the values are no rows, no 0-dim floats, and not equal.
    """
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        return _join_tensors(values, rows, weights, dim, mean, path)
    arrays = all(isinstance(value, np.ndarray) for value in values)
    if arrays and joins([value.shape for value in values], rows, dim):
        return np.concatenate(values, axis=dim)
    lists = len({type(value) for value in values}) == 1 and type(values[0]) in (list, tuple)
    if lists and all(len(value) == number for value, number in zip(values, rows, strict=True)):
        return type(values[0])(entry for value in values for entry in value)
    if all(_equal(values[0], value) for value in values[1:]):
        return values[0]
    if lists:  # of equal lengths that are not the rows': its entries may have rows, as columns of a table do
        parts = [flatten(tuple(value), plain_lists=True) for value in values]
        if len({spec for _, spec in parts}) == 1:
            names = paths(parts[0][1], path)
            joined = join_pieces([leaves for leaves, _ in parts], rows, weights, dim, mean, names)
            return type(values[0])(unflatten(parts[0][1], joined))
    raise GatherError(f"{path} differs among the shards ({_found(values)}) and has not one entry per row. {_WAYS_OUT}")


def join_pieces(
    pieces: Sequence[Sequence[Any]],
    rows: Sequence[int],
    weights: Sequence[float],
    dim: int = 0,
    mean: bool = True,
    names: Sequence[str] | None = None,
) -> list[Any]:
    """Join the leaves of several microbatches of one replica (see `join_leaf`).

    Args:
        pieces: the leaves of each microbatch, as many in each; flatten them with `plain_lists`.
        rows, weights: of each microbatch.
        names: the leaves' paths, for errors.

    Raises:
        GatherError: a leaf cannot be joined, or the microbatches have different numbers of leaves.
    """
    if len({len(piece) for piece in pieces}) > 1:
        raise GatherError(
            f"the microbatches returned different numbers of values ({[len(piece) for piece in pieces]}). {_WAYS_OUT}"
        )
    return [
        join_leaf(values, rows, weights, dim, mean, names[index] if names else f"output {index}")
        for index, values in enumerate(zip(*pieces, strict=True))
    ]


def gather(
    shards: Sequence[Any],
    dim: int = 0,
    *,
    rows: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Any:
    """Join the shards' outputs into one tree, differentiably: the inverse of `scatter`.

    Tensors join along `dim` where their size there is each shard's number of rows, lists with one entry per row
    likewise; 0-dim floats are averaged or summed; equal objects become one. Costs no message.

    Args:
        shards: one tree per shard, of equal structure.
        dim: the dimension of the rows.
        rows: each shard's number of rows; None: the size along `dim` of the first tensor that has it.
        weights: each shard's weight in the mean of 0-dim floats; None: its rows.
        reduction: how 0-dim floats are read.

    Raises:
        GatherError: structures differ, or a leaf cannot be joined; names the leaf.
        ArgumentError: no shards, or not one of `rows` and `weights` per shard.
    """
    _check_dim(dim)
    if reduction not in ("mean", "sum"):
        raise ArgumentError(f"reduction is {reduction!r}; 'mean' or 'sum' is expected.")
    for name, given in (("shards", shards), ("rows", rows), ("weights", weights)):
        if given is not None and (len(given) != len(shards) or not shards):
            raise ArgumentError(f"{name} has {len(given)} entries for {len(shards)} shards; one per shard is expected.")
    parts = [flatten(shard, plain_lists=True) for shard in shards]
    odd = next((index for index, (_, spec) in enumerate(parts) if spec != parts[0][1]), None)
    if odd is not None:
        raise GatherError(f"shard 0 holds {parts[0][1]}, but shard {odd} holds {parts[odd][1]}. {_WAYS_OUT}")
    leaves, spec = [leaves for leaves, _ in parts], parts[0][1]
    counted = rows if rows is not None else _counted_rows(leaves, dim)
    counts = [_UNKNOWN] * len(shards) if counted is None else list(counted)
    shares = [1.0] * len(shards) if counted is None else [float(number) for number in counted]
    shares = shares if weights is None else [float(weight) for weight in weights]
    return unflatten(spec, join_pieces(leaves, counts, shares, dim, reduction == "mean", paths(spec, "output")))


_UNKNOWN = -1  # no size is equal to it, so that nothing counts as rows
_WAYS_OUT = (
    "Read the values shard by shard (`.shards` of a model's output), or say with `out_dims` along which dimension each "
    "output has its rows."
)


def _join_tensors(
    values: Sequence[torch.Tensor], rows: Sequence[int], weights: Sequence[float], dim: int, mean: bool, path: str
) -> torch.Tensor:
    shapes = [tuple(value.shape) for value in values]
    if len({value.dtype for value in values}) > 1:
        raise GatherError(f"{path} has different dtypes on the shards ({_found(values)}). {_WAYS_OUT}")
    if joins(shapes, rows, dim):
        return torch.cat(list(values), dim)
    if any(shapes):
        raise GatherError(
            f"{path} cannot be joined along dim {dim}: its shapes on the shards are {[list(s) for s in shapes]}, but "
            f"their rows are {list(rows)}. {_WAYS_OUT}"
        )
    if mean and not (values[0].is_floating_point() or values[0].is_complex()):
        raise GatherError(
            f"{path} is a 0-dim {values[0].dtype} on each shard ({_found(values)}), of which no mean is taken. Say "
            f"reduction='sum' for a count. {_WAYS_OUT}"
        )
    return _reduce_scalars(values, [float(number) for number in weights] if mean else None)


def _reduce_scalars(values: Sequence[torch.Tensor], weights: Sequence[float] | None) -> torch.Tensor:
    """The weighted mean of 0-dim tensors, or their sum; half precision is added in float32."""
    dtype = values[0].dtype
    wide = torch.float32 if dtype.itemsize < 4 and dtype.is_floating_point else dtype
    if weights is None:
        kept = [value.to(wide) for value in values]
    else:
        total = sum(weights)
        kept = [v.to(wide) * (w / total) for v, w in zip(values, weights, strict=True) if w != 0]
    return torch.stack(kept).sum().to(dtype) if kept else torch.zeros_like(values[0])


def _counted_rows(shards: list[list[Any]], dim: int) -> list[int] | None:
    """The size along `dim` of each shard's first tensor that has it; None where a shard has none."""
    first = [next((n for leaf in leaves if (n := _rows(leaf, dim)) is not None), None) for leaves in shards]
    known = [number for number in first if number is not None]
    return known if len(known) == len(first) else None


def _equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    try:
        return bool(left == right) or bool(left != left and right != right)
    except Exception:  # a class's own == may raise anything; such objects are not known to be equal
        return False


def _found(values: Sequence[Any]) -> str:
    texts = [f"{v.dtype} {list(v.shape)}" if isinstance(v, torch.Tensor | np.ndarray) else repr(v) for v in values[:4]]
    return ", ".join(text if len(text) <= 60 else text[:57] + "..." for text in texts) + ", ..." * (len(values) > 4)

"""Lists with one entry per row among a call's outputs, as detection models return them: joined, or refused.

Runs on the driver. A list of k entries from a shard of k rows may be one entry per row, to be joined to a list of N, or
k columns, each to be joined along the rows. Joining costs one message per worker and brings the values; each entry then
is a plain tensor with its graph.

Invariant: where the two cannot be told apart, it is an error; a list never silently has the wrong length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ray import cloudpickle

from . import tree
from .containers import Spec
from .errors import GatherError
from .graph import Shard, Token, apply, wide
from .program import CallResult, Fetch, Structure
from .remote_call import RemoteCall


def whole_output(structures: Sequence[Structure], sizes: Sequence[int]) -> bool:
    """Whether every shard's output is a list as long as the shard."""
    lengths = [len(s.spec.children) if s.spec.node is list else -1 for s in structures]
    return len(sizes) > 1 and lengths == list(sizes)


def suspects(structure: Structure, size: int) -> Iterator[tuple[str, range, bool]]:
    """The lists of `size` entries in a structure: path, the numbers of their leaves, and whether it is the whole."""

    def walk(spec: Spec, path: str, start: int) -> Iterator[tuple[str, range, bool]]:
        if spec.node is list and len(spec.children) == size:
            yield path, range(start, start + spec.num_leaves), start == 0 and spec is structure.spec
        for child, name in zip(spec.children, _steps(spec), strict=True):
            yield from walk(child, path + name, start)
            start += child.num_leaves

    yield from walk(structure.spec, "output", 0)


def _steps(spec: Spec) -> list[str]:
    steps, found = tree.paths(spec), []
    for child in spec.children:
        found.append(steps[0] if child.num_leaves == 1 else "[...]")
        steps = steps[child.num_leaves :]
    return found


def is_per_row(call: RemoteCall, structure: Structure, sizes: Sequence[int]) -> bool:
    """Whether the output, alike on all replicas, is a list with one entry per row.

    Raises:
        GatherError: it cannot be told, or such a list lies inside another container.
    """
    if len(sizes) < 2 or len(set(sizes)) > 1:
        return False
    for path, leaves, whole in suspects(structure, sizes[0]):
        tensors = [k for k in leaves if structure.leaves[k].tensor]
        if not tensors or (sizes[0] > 1 and all(call.joins(k) for k in tensors)):
            continue
        shapes = {shape for k in tensors for shape in call.shapes(k)}
        if whole and len(shapes) > 1 and not all(call.joins(k) for k in tensors):
            return True
        raise GatherError(
            f"{path} is a list of {sizes[0]} values from shards of {sizes[0]} rows each: one entry per row, or one "
            "value of all rows in each entry? Return a tuple for the latter; for the former stack the entries to one "
            "tensor, or return the list alone, as the whole output, with entries of different sizes"
        )
    return False


def join_rows(
    call: RemoteCall, structures: Sequence[Structure], results: Sequence[CallResult], token: Token | None
) -> list[Any]:
    """One list with an entry per row, of the replicas' lists. One message per worker, and waits.

    Raises:
        GatherError: the entries of different replicas are different containers.
    """
    longest = max(structures, key=lambda s: len(s.leaves))
    entry = longest.spec.children[0]
    if any(child != entry for s in structures for child in s.spec.children):
        raise GatherError("the model returned a list with one entry per row, whose entries are different containers")
    with_values = [k for k, kind in enumerate(longest.leaves) if kind.tensor]
    pending = {
        k: call.stream.record(Fetch, call=call.id, leaf=k)
        for k in with_values
        if any(k < len(s.leaves) and s.leaves[k].ndim > 0 for s in structures)
    }
    joined: list[Any] = []
    for rank, structure, result in zip(call.answer.ranks(), structures, results, strict=True):
        objects = cloudpickle.loads(result.objects) if result.objects else {}
        scalars = dict(result.scalars)
        leaves: list[Any] = []
        for k, kind in enumerate(structure.leaves):
            if not kind.tensor:
                leaves.append(objects.get(k))
                continue
            part = (
                call.answer.scalar(kind, scalars[k])
                if kind.ndim == 0
                else tree.from_wire(pending[k].wait("the entries of a list of outputs")[rank], call.device)
            )
            if token is not None and kind.requires_grad:
                with wide():
                    part = apply(Shard, call, k, rank, token.tensor(), part)
            leaves.append(part)
        per_entry = entry.num_leaves
        joined += [
            tree.unflatten(entry, leaves[k : k + per_entry]) for k in range(0, len(leaves), per_entry or len(leaves))
        ]
    return joined

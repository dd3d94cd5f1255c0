"""Take nested containers apart and put them together: the part of tree.py that knows containers.

Runs on both sides. What crosses between processes: `Spec`s, inside the structure of a call's output.

Invariant: `unflatten(spec, leaves)` of what `flatten` returned is a tree of the same classes, keys, attributes and
order; a dataclass's constructor is not called, and leaves are passed on and never looked into.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree


@dataclass(frozen=True)
class Spec:
    """The containers of a tree without its leaves: hashable, comparable, picklable (by cloudpickle for local classes).

    `node` is the container's class, None for a leaf; `context` is what its class needs to be rebuilt (keys, names).
    """

    node: type | None = None
    context: Any = None
    children: tuple[Spec, ...] = ()
    rebuild: Callable[[Any, Any], Any] | None = field(default=None, compare=False, repr=False)

    def __hash__(self) -> int:
        return hash((self.node, _hashable(self.context), self.children))

    @property
    def num_leaves(self) -> int:
        """How many leaves `unflatten` takes."""
        return 1 if self.node is None else sum(child.num_leaves for child in self.children)

    def __str__(self) -> str:
        if self.node is None:
            return "*"
        steps = zip(_steps(self), self.children, strict=True)
        return f"{self.node.__name__}({', '.join(f'{step}: {child}' for step, child in steps)})"


@dataclass(frozen=True)
class _Record:
    """The context of an object that is rebuilt from its dict items and attributes, without calling its constructor.

    `linked` attributes are the items of the same name (as in transformers' ModelOutput).
    """

    keys: tuple[Any, ...]
    names: tuple[str, ...]
    linked: tuple[str, ...]


@dataclass(frozen=True)
class Replicated:
    """A value that goes to all shards whole; made by `replicate`."""

    value: Any


def replicate(value: Any) -> Replicated:
    """Mark an argument of a call or of `scatter` that every shard gets whole, whatever its size.

    Args:
        value: any tree; a tensor or a list in it is not cut.
    """
    return Replicated(value)


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, *, plain_lists: bool = False
) -> tuple[list[Any], Spec]:
    """Take a tree apart into its leaves, in order, and the spec that puts them together again.

    Args:
        tree: any nesting of what torch's pytree knows (dict, list, tuple, namedtuple, OrderedDict, defaultdict, deque,
            classes registered by libraries), dataclass instances and subclasses of dict. None is a leaf.
        is_leaf: stops the descent at an object for which it returns True.
        plain_lists: make every outermost list or tuple without tensors inside one leaf, as it may have one entry per
            row: so the spec of an output does not vary with the number of rows. A tuple that is the whole tree (what
            `return a, b` gives) is taken apart.
    """
    leaves: list[Any] = []
    spec = walk(tree, is_leaf, leaves, None, False)
    if plain_lists:
        leaves, _, spec = collapse(spec, iter(leaves), iter([False] * len(leaves)), None, type(tree) is tuple)
    return leaves, spec


def unflatten(spec: Spec, leaves: Sequence[Any]) -> Any:
    """Put leaves into the containers of `spec`: the inverse of `flatten`.

    Raises:
        ValueError: the number of leaves is not the spec's.
    """
    if len(leaves) != spec.num_leaves:
        raise ValueError(f"a spec of {spec.num_leaves} leaves was given {len(leaves)}.")
    return _rebuild(spec, iter(leaves))


def paths(spec: Spec, root: str = "") -> list[str]:
    """The path of every leaf as Python writes it: `root[0]['x'].mask`."""
    if spec.node is None:
        return [root or "the value"]
    return [path for step, child in zip(_steps(spec), spec.children, strict=True) for path in paths(child, root + step)]


def walk(
    tree: Any, is_leaf: Callable[[Any], bool] | None, leaves: list[Any], whole: list[bool] | None, inside: bool
) -> Spec:
    """Append the leaves and, where `whole` is given, whether each lies inside a `Replicated`, which is unwrapped."""
    if whole is not None and isinstance(tree, Replicated):
        return walk(tree.value, is_leaf, leaves, whole, True)
    parts = None if is_leaf is not None and is_leaf(tree) else _parts(tree)
    if parts is None:
        leaves.append(tree)
        if whole is not None:
            whole.append(inside)
        return Spec()
    children, context, rebuild = parts
    specs = tuple(walk(child, is_leaf, leaves, whole, inside) for child in children)
    return Spec(type(tree), context, specs, rebuild)


def _parts(tree: Any) -> tuple[list[Any], Any, Callable[[Any, Any], Any] | None] | None:
    """The children of a container, its context, and how to rebuild it; None for a leaf."""
    cls = type(tree)
    if isinstance(tree, torch.Tensor | np.ndarray) or tree is None:
        return None
    registered = _pytree.SUPPORTED_NODES.get(cls)
    if registered is not None:
        children, context = registered.flatten_fn(tree)
        known_everywhere = cls.__module__.partition(".")[0] in ("builtins", "collections", "torch")
        return list(children), context, None if known_everywhere else registered.unflatten_fn
    if isinstance(tree, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make"):
        return list(tree), tuple(cls._fields), None
    is_dict = isinstance(tree, dict)
    if not (is_dict or isinstance(tree, UserDict) or dataclasses.is_dataclass(tree)):
        return None
    if isinstance(tree, type | torch.nn.Module | BaseException | Enum | int | float | str | bytes | tuple | list):
        return None
    items = dict.items(tree) if is_dict else {}.items()
    known = dict(items)
    attributes = _attributes(tree)
    linked = tuple(name for name, value in attributes.items() if name in known and known[name] is value)
    names = tuple(name for name in attributes if name not in linked)
    context = _Record(tuple(key for key, _ in items), names, linked)
    return [value for _, value in items] + [attributes[name] for name in names], context, None


def _attributes(tree: Any) -> dict[str, Any]:
    """What an object holds in its `__dict__` and its slots."""
    found = dict(getattr(tree, "__dict__", {}))
    for cls in type(tree).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(tree, name):
                found[name] = getattr(tree, name)
    if isinstance(tree, defaultdict):
        found["default_factory"] = tree.default_factory
    return found


def _rebuild(spec: Spec, leaves: Iterator[Any]) -> Any:
    if spec.node is None:
        return next(leaves)
    children = [_rebuild(child, leaves) for child in spec.children]
    if isinstance(spec.context, _Record):
        return _rebuild_record(spec.node, spec.context, children)
    registered = _pytree.SUPPORTED_NODES.get(spec.node)
    if registered is not None:
        return registered.unflatten_fn(children, spec.context)
    if spec.rebuild is not None:
        return spec.rebuild(children, spec.context)
    return spec.node._make(children)  # type: ignore[attr-defined]


def _rebuild_record(cls: Any, record: _Record, children: list[Any]) -> Any:
    base: Any = next(base for base in (OrderedDict, defaultdict, dict, object) if issubclass(cls, base))
    new = base.__new__(cls)
    items = dict(zip(record.keys, children, strict=False))
    for key, value in items.items():
        base.__setitem__(new, key, value)
    for name, value in zip(record.names, children[len(record.keys) :], strict=True):
        object.__setattr__(new, name, value)
    for name in record.linked:
        object.__setattr__(new, name, items[name])
    return new


def _steps(spec: Spec) -> list[str]:
    """How Python writes the way from a container to each of its children."""
    context = spec.context
    if isinstance(context, _Record):
        return [f"[{key!r}]" for key in context.keys] + [f".{name}" for name in context.names]
    if isinstance(spec.node, type) and hasattr(spec.node, "_fields"):
        return [f".{name}" for name in spec.node._fields]
    if isinstance(spec.node, type) and issubclass(spec.node, defaultdict):
        context = context[1]
    if isinstance(spec.node, type) and issubclass(spec.node, dict) and len(context) == len(spec.children):
        return [f"[{key!r}]" for key in context]
    return [f"[{index}]" for index in range(len(spec.children))]


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    try:
        hash(value)
    except TypeError:
        return type(value)
    return value


def collapse(
    spec: Spec, leaves: Iterator[Any], whole: Iterator[bool], rows: int | None, protected: bool
) -> tuple[list[Any], list[bool], Spec]:
    """Turn every outermost list or tuple of `rows` entries (None: of any length) without tensors inside into one leaf.

    With `rows` told, a tuple of numbers is a size or some dimensions and has no entry per row, whatever its length.
    `protected` spares this container itself (the tuple of a call's arguments), not those inside.
    """
    if spec.node is None:
        return [next(leaves)], [next(whole)], spec
    if spec.node in (list, tuple) and rows in (None, len(spec.children)) and not protected:
        num = spec.num_leaves
        held, flags = [next(leaves) for _ in range(num)], [next(whole) for _ in range(num)]
        numbers = all(isinstance(leaf, int | float | complex) for leaf in held)
        is_size = rows is not None and spec.node is tuple and numbers
        if not is_size and not any(flags) and not any(isinstance(leaf, torch.Tensor | np.ndarray) for leaf in held):
            return [unflatten(spec, held)], [False], Spec()
        leaves, whole = iter(held), iter(flags)
    parts = [collapse(child, leaves, whole, rows, False) for child in spec.children]
    return (
        [leaf for part in parts for leaf in part[0]],
        [flag for part in parts for flag in part[1]],
        dataclasses.replace(spec, children=tuple(part[2] for part in parts)),
    )

"""`.grad` of a remote parameter: a handle of true shape and dtype whose values stay on the workers.

Runs on the driver. Operations among handles and numbers are run where the gradients are, on all replicas alike, so that
stock clipping moves 4 bytes; they gather and cross as one `Apply`. Anything else fetches the values (one message per
worker; a second look at another gradient brings all), and what the driver then changes travels back.

Invariant: a handle reads as the tensor that plain PyTorch would hold: the gradient as it is now, or, once the
parameter's `.grad` was set to None or to another tensor, as it was then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import operations
from .errors import UnsupportedError
from .operations import LOOKS, METADATA, Function, Operation, replaced, tensors_in
from .values import Cell

T: Any = Tensor
_ITSELF = frozenset((T.data.__get__, T.detach, torch.detach, T.detach_, T.cpu))
_SIZE_OF_OTHER = frozenset((T.view_as, T.reshape_as, T.expand_as, T.type_as))
_NORMS = frozenset((torch.linalg.vector_norm, torch.norm, T.norm, torch._foreach_norm))
_ESCAPES = ("storage", "untyped_storage", "_typed_storage", "__dlpack__", "share_memory_", "register_hook")


class RemoteGradient(torch.Tensor):
    """A gradient, or a value computed from gradients, that lies on the workers; use it as any tensor.

    `fetch()` returns a plain copy. Arithmetic costs no message by itself, a look at values one per worker.
    """

    _cell: Cell

    @staticmethod
    def __new__(cls, cell: Cell) -> RemoteGradient:  # noqa: D102
        meta = cell.meta
        made: RemoteGradient = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("cpu")
        )
        return made

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def fetch(self) -> Tensor:
        """The present values as a plain tensor of their own. One message per worker, and waits."""
        return self._cell.owner.fetch(self._cell).clone()

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            _refuse(func)
            if func in METADATA or func == T.grad.__get__:
                return _metadata(func, args, kwargs)
            first = args[0] if args else None
            if isinstance(first, RemoteGradient):
                if func == T.data.__set__:
                    value = args[1].fetch() if _is(args[1]) else args[1]
                    first._cell.owner.overwrite(first._cell, value)
                    return None
                if func in _ITSELF:
                    return first
                if func is T.to and (moved := _to(first, args[1:], kwargs)) is not NotImplemented:
                    return moved
            if func in operations.SHAPE_ONLY and operations.is_random(func):
                shapes = replaced((args, kwargs), _shape_of)
                return func(*shapes[0], **shapes[1])
            done, result = _on_workers(func, args, kwargs)
        return result if done else _on_driver(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Only code that switched __torch_function__ off comes here; it may read.
        values = pytree.tree_map(lambda x: x.fetch() if _is(x) else x, (args, kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise UnsupportedError(f"{func} would write unseen into a gradient on the workers: use p.grad.fetch()")
        return func(*values[0], **values[1])

    def __format__(self, spec: str) -> str:
        return format(self.fetch(), spec)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self.fetch())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.fetch()
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.fetch()
        return plain.__reduce_ex__(protocol)


def _is(x: Any) -> bool:
    return isinstance(x, RemoteGradient)


def _shape_of(x: Any) -> Any:
    return torch.empty_like(x._cell.meta, device="cpu") if _is(x) else x


def _refuse(func: Function) -> None:
    name = getattr(func, "__name__", "")
    if name.startswith("_amp_"):
        raise UnsupportedError(
            "GradScaler cannot unscale gradients that lie on the workers: leave it out and compute in bf16, with "
            "torch.autocast('cuda', dtype=torch.bfloat16) around the call (it travels along), which needs no scaler"
        )
    if name in _ESCAPES:
        raise UnsupportedError(f"{name}() on a gradient that lies on the workers: use a copy, p.grad.fetch().{name}()")


def _metadata(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wants = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if func in (T.requires_grad_, T.requires_grad.__set__) and wants:
        raise UnsupportedError(
            "a gradient that lies on the workers cannot require grad itself: second derivatives do not cross; compute "
            "the penalty inside the module and return it, or use model.run"
        )
    return func(*args, **kwargs)


def _to(handle: RemoteGradient, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.to` within the CPU keeps the value on the workers: only a change of dtype is an operation."""
    if args and isinstance(args[0], Tensor):
        device, dtype, memory_format, copy = args[0].device, args[0].dtype, None, kwargs.get("copy", False)
    else:
        copy = kwargs.get("copy", False)
        try:
            rest = {k: v for k, v in kwargs.items() if k != "copy"}
            device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **rest)
        except (TypeError, RuntimeError):
            return NotImplemented
    if (device is not None and device.type != "cpu") or memory_format is not None or copy:
        return NotImplemented
    if dtype is None or dtype == handle._cell.meta.dtype:
        return handle
    done, result = _on_workers(T.to, (handle, dtype), {})
    return result if done else NotImplemented


def _on_workers(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Record a call on handles, numbers and 0-dim tensors whose result has a shape that follows from theirs.

    Returns:
        whether it was recorded, and the result.
    """
    name = operations.name_of(func)
    if name is None or getattr(func, "__name__", "") in LOOKS or operations.is_random(func):
        return False, None
    if func in _SIZE_OF_OTHER:
        args = replaced(args, lambda x: x.to("meta") if isinstance(x, Tensor) and not _is(x) else x)
    tensors = tensors_in((args, kwargs))
    handles = [t for t in tensors if isinstance(t, RemoteGradient)]
    constants = {id(t): _constant(t) for t in tensors if not _is(t)}
    cells = [h._cell for h in handles]
    if None in constants.values() or len({id(c.owner.stream) for c in cells}) != 1:
        return False, None
    shadows: dict[int, Any] = {key: c.to("meta") for key, c in constants.items() if c is not None}
    shadows |= {id(h): h._cell.meta for h in handles}
    shadow_args, shadow_kwargs = replaced((args, kwargs), lambda x: shadows.get(id(x), x))
    try:
        with torch.no_grad():
            outcome = _norm(func, shadow_args, shadow_kwargs)
            if outcome is None:
                outcome = func(*shadow_args, **shadow_kwargs)
    except Exception:  # what cannot be known without values, and mistakes: those raise again on the values
        return False, None
    leaves, spec = pytree.tree_flatten(outcome)
    if not all(leaf is None or (isinstance(leaf, Tensor) and leaf.is_meta) for leaf in leaves):
        return False, None
    known: dict[int, Any] = {**constants, **{id(h): h._cell for h in handles}}
    marked = replaced((args, kwargs), lambda x: known.get(id(x), x))
    made = cells[0].owner.note(Operation(name, *marked), cells, leaves)
    same = {id(h._cell.meta): h for h in handles}
    results = [RemoteGradient(c) if c is not None else same.get(id(x)) for c, x in zip(made, leaves, strict=True)]
    return True, pytree.tree_unflatten(results, spec)


def _norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of a norm over all elements, for which torch's own meta functions take a millisecond each."""
    if func not in _NORMS or len(args) > 2 or kwargs.keys() - {"ord", "p"}:
        return None
    tensors = args[0] if func is torch._foreach_norm else args[:1]
    if not all(t.dtype.is_floating_point for t in tensors):
        return None
    found = tuple(torch.empty((), dtype=t.dtype, device="meta") for t in tensors)
    return found if func is torch._foreach_norm else found[0]


def _constant(tensor: Tensor) -> Tensor | None:
    """A plain tensor that may travel inside an operation, None for one with rows of its own."""
    if tensor.is_meta:
        return tensor
    if tensor.ndim or tensor.layout is not torch.strided:
        return None
    if type(tensor) is Tensor:
        return tensor.detach().cpu()
    return None


def _on_driver(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the call on fetched values; what it changed travels back."""
    handles = {id(t): t for t in tensors_in((args, kwargs)) if isinstance(t, RemoteGradient)}
    looks = getattr(func, "__name__", "") in LOOKS
    values = {key: h.fetch() if looks else h._cell.owner.fetch(h._cell) for key, h in handles.items()}
    versions = {key: value._version for key, value in values.items()}
    plain = replaced((args, kwargs), lambda x: values.get(id(x), x))
    result = func(*plain[0], **plain[1])
    for key, handle in handles.items():
        if values[key]._version != versions[key]:
            handle._cell.owner.overwrite(handle._cell, values[key])
    back = {id(value): handles[key] for key, value in values.items()}
    storages = {value.untyped_storage()._cdata for value in values.values()}

    def returned(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in back:
            return back[id(leaf)]
        if type(leaf) is Tensor and leaf.untyped_storage()._cdata in storages:
            raise UnsupportedError(
                f"{getattr(func, '__name__', func)} would return a view of a gradient that lies on the workers; take a "
                "plain copy, p.grad.fetch(), and assign it back if you change it"
            )
        return leaf

    if looks:
        _lock(result)
        return result
    return pytree.tree_map(returned, result)


def _lock(result: Any) -> None:
    """A numpy array of a gradient is a copy: nobody may write into it and think that it travels."""
    flags = getattr(result, "flags", None)
    if flags is not None and hasattr(flags, "writeable"):
        flags.writeable = False

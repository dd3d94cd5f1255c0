"""`RemoteTensor`: what a model call returns; rows that lie on the workers, as a real `torch.Tensor` without storage.

Runs on the driver. Nothing crosses until somebody looks: any Python-level look at the values fetches them once, with
the graph attached, so that a loss computed on the driver trains the workers' model. These stay remote and move no
data: `detach()`; 0-dim floats times or divided by numbers, added, or under `mean()` and `sum()`; a leaf fed to another
call.

To C++ the object is an empty tensor that requires grad, so a gradient that would go past us fails loudly.

Invariant: whatever an operation does, its result and its gradient equal those on the plain value, or it raises.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .errors import UnsupportedError
from .program import LeafKind
from .source import Source

MAX_DEPTH = 64  # of an expression of remote scalars, before it is computed
NUMBERS = (int, float, bool)


class RemoteTensor(torch.Tensor):
    """One output of a model call. Use it as any tensor; `fetch()` brings its values, `shards` those of each replica.

    Reading the values costs one message per worker the first time (none for 0-dim outputs, which come home with the
    call's reply) and waits for the call; `.shape` waits for metadata only, `.dtype` for nothing.
    """

    _call: Source | None
    _leaf: int
    _token: Tensor | None
    _original: RemoteTensor | None
    _function: Callable[..., Any] | None
    _arguments: tuple[Any, ...]
    _handle: Tensor | None
    _value: Tensor | None
    _depth: int

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: torch.device, guard: bool) -> RemoteTensor:
        made: RemoteTensor = torch.Tensor._make_wrapper_subclass(
            cls, (0,), dtype=dtype, device=device, requires_grad=guard
        )
        return made

    def __init__(self, dtype: torch.dtype, device: torch.device, guard: bool) -> None:
        self._call, self._leaf, self._token = None, 0, None
        self._original, self._function, self._arguments = None, None, ()
        self._handle, self._value, self._depth = None, None, 0

    @classmethod
    def of(cls, call: Source, leaf: int, token: Tensor | None, device: torch.device) -> RemoteTensor:
        """Output `leaf` of a call; `token` is the call's anchor in the driver's graph, None without grad mode."""
        kind = call.kind(leaf)
        made = cls(getattr(torch, kind.dtype), device, token is not None and kind.requires_grad)
        made._call, made._leaf, made._token = call, leaf, token
        return made

    # ---- looking

    def fetch(self) -> Tensor:
        """The values as a plain tensor `[rows, ...]` on the output device, with the graph attached; once, then kept."""
        if self._value is None:
            with wide():
                if self._original is not None:
                    self._value = self._original.fetch().detach()
                elif self._call is not None:
                    self._value = self._call.fetch(self._leaf, self._token)
                else:
                    self._value = self._compute()
        return self._value

    def _compute(self) -> Tensor:
        """The value of an expression of scalars; its gradient goes through the handle."""
        assert self._function is not None
        assert self._handle is not None
        arguments = [a.fetch().detach() if isinstance(a, RemoteTensor) else a for a in self._arguments]
        value: Tensor = self._function(*arguments)
        handle, self._arguments = self._handle, ()
        return _Substitute.apply(handle, value) if handle.requires_grad else value

    @property
    def shards(self) -> list[Tensor]:
        """The values of each replica that had rows, in order, each with the graph attached. One message per worker."""
        call = self._call
        if call is None:
            source = self._original
            return [s.detach() for s in source.shards] if source is not None else [self.fetch()]
        with wide():
            return call.shards(self._leaf, self._token)

    def is_known(self) -> bool:
        """Whether reading the value would neither wait nor send."""
        if self._value is not None:
            return True
        if self._original is not None:
            return self._original.is_known()
        if self._call is not None:
            return self._call.is_known(self._leaf)
        return all(a.is_known() for a in self._arguments if isinstance(a, RemoteTensor))

    # ---- staying remote

    def is_scalar(self) -> bool:
        """Whether this is a 0-dim float, so that linear arithmetic may stay remote."""
        if self._original is not None:
            return self._original.is_scalar()
        if self._call is not None:
            kind = self._call.kind(self._leaf)
            return kind.ndim == 0 and has_mean(kind)
        return True

    def handle(self) -> Tensor:
        """The driver's stand-in for a scalar: a 0-dim tensor whose gradient is this one's."""
        if self._handle is None:
            with wide():
                if self._original is not None:
                    self._handle = self._original.handle().detach()
                else:
                    assert self._call is not None
                    token = self._token if self._token is not None else torch.zeros(())
                    self._handle = self._call.stand_in(self._leaf, token)
        return self._handle

    def source(self) -> tuple[Source, int, bool] | None:
        """(call, leaf, differentiable) if the rows still lie on the workers as they are here, so that another call may
        take them there.
        """
        origin = self if self._original is None else self._original
        call = origin._call
        if call is None or call.kind(origin._leaf).ndim <= 0:
            return None
        if any(t._value is not None and t._value._version for t in (self, origin)):
            return None  # fetched and changed on the driver
        return call, origin._leaf, self._original is None and self._differentiable()

    def _differentiable(self) -> bool:
        return self._token is not None and self._call is not None and self._call.kind(self._leaf).requires_grad

    def rows(self) -> int | None:
        """The number of rows of a value that another call may take where it lies, else None."""
        found = self.source()
        return found[0].rows() if found is not None else None

    # ---- torch

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            special = _SPECIAL.get(func)
            if special is not None and args and isinstance(args[0], RemoteTensor):
                found = special(args[0], args, kwargs)
                if found is not NotImplemented:
                    return found
            if func in _ENGINE:
                return _engine(func, args, kwargs)
            if _is_linear(func, args, kwargs):
                return _expression(func, args)
        values = _fetched((args, kwargs))
        return func(*values[0], **values[1])

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Only code that switched __torch_function__ off comes here; values are right, a gradient would fail loudly.
        values = pytree.tree_map(
            lambda x: x.fetch().detach() if isinstance(x, RemoteTensor) else x, (args, kwargs or {})
        )
        return func(*values[0], **values[1])

    def __format__(self, spec: str) -> str:
        return format(self.fetch(), spec)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self.fetch())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.fetch(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetch().detach().__reduce_ex__(protocol)


def has_mean(kind: LeafKind) -> bool:
    """Whether values of a leaf have a mean: floats and complex numbers."""
    dtype: torch.dtype = getattr(torch, kind.dtype)
    return dtype.is_floating_point or dtype.is_complex


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Grad mode on and inference mode off, whatever the caller's: a value is fetched once, for all later uses."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.enable_grad():
        yield


def no_double_backward() -> None:
    """Raise inside a backward that builds a graph: second derivatives do not cross to the workers."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "create_graph=True goes through a call of the remote model, whose graph lies on the workers: compute the "
            "penalty inside the module and return it, or use model.run"
        )


class _Substitute(torch.autograd.Function):
    """A value computed on the driver in place of its stand-in; the gradient goes on to the stand-in."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def _fetched(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.fetch() if isinstance(x, RemoteTensor) else x, tree)


T = torch.Tensor
_ADD = (T.add, T.__add__, T.__radd__, T.sub, T.__sub__, T.__rsub__, torch.add, torch.sub)
_MULTIPLY = (T.mul, T.__mul__, T.__rmul__, torch.mul)
_DIVIDE = (T.div, T.__truediv__, T.true_divide, torch.div, torch.true_divide)
_ONE = (T.neg, T.__neg__, torch.neg, T.mean, T.sum, torch.mean, torch.sum, T.clone, torch.clone)
_LINEAR = frozenset((*_ADD, *_MULTIPLY, *_DIVIDE, *_ONE))


def _is_linear(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """May the result stay remote? Only if it is linear in unfetched scalars and all else are plain numbers."""
    if kwargs or func not in _LINEAR:
        return False

    def lazy(x: Any) -> bool:
        return isinstance(x, RemoteTensor) and x._value is None and x.is_scalar()

    if not all(lazy(x) or isinstance(x, NUMBERS) for x in args):
        return False
    num_remote = sum(isinstance(x, RemoteTensor) for x in args)
    if func in _ADD:
        return len(args) == 2
    if func in _MULTIPLY:
        return len(args) == 2 and num_remote == 1
    if func in _DIVIDE:
        return len(args) == 2 and lazy(args[0]) and num_remote == 1
    return len(args) == 1


def _expression(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    handle = func(*[a.handle() if isinstance(a, RemoteTensor) else a for a in args])
    remote = [a for a in args if isinstance(a, RemoteTensor)]
    made = RemoteTensor(handle.dtype, remote[0].device, handle.requires_grad)
    made._function, made._arguments, made._handle = func, args, handle
    made._depth = 1 + max(a._depth for a in remote)
    if made._depth > MAX_DEPTH or all(a.is_known() for a in remote):
        made.fetch()
        made._depth = 0
    return made


def _backward(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return T.backward(_root(self), *_fetched(args[1:]), **_fetched(_checked(kwargs)))


def _root(x: Any) -> Any:
    """What a backward starts from: the stand-in of a scalar, else the value."""
    if not isinstance(x, RemoteTensor):
        return x
    return x.handle() if x._value is None and x.is_scalar() else x.fetch()


def _checked(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("inputs") is not None:
        _refuse_parameters(kwargs["inputs"])
    return kwargs


def _refuse_parameters(inputs: Any) -> None:
    for x in pytree.tree_leaves(inputs):
        if getattr(x, "is_remote_parameter", False):
            raise UnsupportedError(
                "gradients with respect to parameters of the remote model arrive in their .grad by loss.backward(); for "
                "torch.autograd.grad compute them on the workers with model.run"
            )


def _engine(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.backward and grad: their roots may stay remote."""
    _refuse_parameters((args[1:], {k: v for k, v in kwargs.items() if k == "inputs"}))
    name = "tensors" if func is torch.autograd.backward else "outputs"
    roots = args[0] if args else kwargs.pop(name)
    several = isinstance(roots, Sequence) and not isinstance(roots, Tensor)
    roots = tuple(map(_root, roots)) if several else _root(roots)
    return func(roots, *_fetched(args[1:]), **_fetched(kwargs))


def _detach(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if self._value is not None:
        return NotImplemented
    made = RemoteTensor(self.dtype, self.device, False)
    made._original = self if self._original is None else self._original
    made._depth = self._depth
    return made


def _register_hook(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if self._value is None and self.is_scalar():
        return T.register_hook(self.handle(), *args[1:], **kwargs)
    return NotImplemented


def _leaf_shape(self: RemoteTensor) -> torch.Size | None:
    """The true shape without the values, None where only they tell."""
    if self._value is not None:
        return self._value.shape
    origin = self if self._original is None else self._original
    return origin._call.shape(origin._leaf) if origin._call is not None else torch.Size(())


def _shape(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _leaf_shape(self)


def _size(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = _leaf_shape(self)
    assert shape is not None
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _ndim(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    origin = self if self._original is None else self._original
    if origin._value is None and origin._call is not None:
        return origin._call.kind(origin._leaf).ndim
    shape = _leaf_shape(self)
    assert shape is not None
    return len(shape)


def _numel(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = _leaf_shape(self)
    assert shape is not None
    return shape.numel()


def _length(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = _leaf_shape(self)
    return shape[0] if shape else NotImplemented


def _requires_grad(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if self._value is not None:
        return self._value.requires_grad
    if self._original is not None:
        return False
    return self._handle.requires_grad if self._call is None and self._handle is not None else self._differentiable()


def _number(get: Callable[..., Any]) -> Callable[..., Any]:
    """A look at the number alone; torch would warn of a graph that such a look loses."""
    return lambda self, args, kwargs: get(self.fetch().detach(), *args[1:], **kwargs)


def _plain(get: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, args, kwargs: get(*args, **kwargs)


_SPECIAL: dict[Any, Callable[[RemoteTensor, tuple[Any, ...], dict[str, Any]], Any]] = {
    T.backward: _backward,
    T.detach: _detach,
    torch.detach: _detach,
    T.register_hook: _register_hook,
    T.shape.__get__: _shape,  # type: ignore[attr-defined]
    T.size: _size,
    T.ndim.__get__: _ndim,  # type: ignore[attr-defined]
    T.dim: _ndim,
    T.ndimension: _ndim,
    T.numel: _numel,
    T.nelement: _numel,
    torch.numel: _numel,
    T.__len__: _length,
    T.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    T.item: _number(T.item),
    T.__float__: _number(T.__float__),
    T.__int__: _number(T.__int__),
    T.__bool__: _number(T.__bool__),
    T.__complex__: _number(T.__complex__),
    T.dtype.__get__: _plain(T.dtype.__get__),  # type: ignore[attr-defined]
    T.device.__get__: _plain(T.device.__get__),  # type: ignore[attr-defined]
    T.__hash__: _plain(T.__hash__),
    T.is_floating_point: _plain(T.is_floating_point),
    torch.is_floating_point: _plain(torch.is_floating_point),
    T.is_complex: _plain(T.is_complex),
    torch.is_complex: _plain(torch.is_complex),
    T.element_size: _plain(T.element_size),
}
_ENGINE = frozenset((torch.autograd.backward, torch.autograd.grad))

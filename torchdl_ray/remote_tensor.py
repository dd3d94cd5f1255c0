"""`RemoteTensor`: what a model call returns; rows that lie on the workers, as a real `torch.Tensor` without storage.

Runs on the driver. Nothing crosses until somebody looks: any Python-level look at the values fetches them once, with
the graph attached, so that a loss computed on the driver trains the workers' model. These stay remote and move no
data: `detach()`; 0-dim floats times or divided by numbers, added, in place or not, or under `mean()` and `sum()`; a
leaf fed to another call.

To C++ the object is an empty tensor that requires grad, so a gradient that would go past us fails loudly; code that
takes tensors below Python (a torch.autograd.Function, a scripted function, vmap) is given `.fetch()`.

Invariant: whatever an operation does, its result and its gradient equal those on the plain value, or it raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .arithmetic import IN_PLACE, linear, through
from .errors import UnsupportedError
from .graph import Substitute, Token, apply, reaches_another, wide
from .looks import EXPOSING, LOOKS
from .program import LeafKind
from .scalar import Box, Term
from .source import Source


class RemoteTensor(torch.Tensor):
    """One output of a model call. Use it as any tensor; `fetch()` brings its values, `shards` those of each replica.

    Reading the values costs one message per worker the first time (none for 0-dim outputs, which come home with the
    call's reply) and waits for the call; `.shape` waits for metadata only, `.dtype` for nothing.
    """

    _call: Source | None  # None for expressions, and for numbers that were detached
    _leaf: int
    _token: Token | None
    _original: RemoteTensor | None  # rows: what this was detached from
    _box: Box | None  # a 0-dim float's memory
    _handle: Tensor | None  # a 0-dim float's stand-in, whose gradient is this one's
    _value: Tensor | None
    _born: int  # the value's version when it was fetched
    _watched: bool  # somebody wants to see the gradient here
    _fed: bool  # another call took the rows, and returns its gradient to the workers
    _exposed: bool  # the values may have been changed without a trace

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: torch.device, guard: bool) -> RemoteTensor:  # noqa: D102
        made: RemoteTensor = torch.Tensor._make_wrapper_subclass(
            cls, (0,), dtype=dtype, device=device, requires_grad=guard
        )
        return made

    def __init__(self, dtype: torch.dtype, device: torch.device, guard: bool) -> None:
        self._call, self._leaf, self._token, self._original = None, 0, None, None
        self._box, self._handle, self._value = None, None, None
        self._born, self._watched, self._fed, self._exposed = 0, False, False, False

    @classmethod
    def of(cls, call: Source, leaf: int, token: Token | None, device: torch.device) -> RemoteTensor:
        """Output `leaf` of a call; `token` is the call's anchor in the driver's graph, None without grad mode."""
        kind = call.kind(leaf)
        made = cls(getattr(torch, kind.dtype), device, token is not None and kind.requires_grad)
        made._call, made._leaf, made._token = call, leaf, token
        if kind.ndim == 0 and has_mean(kind):
            made._box = Box(Term.read(call.numbers(), leaf))
        return made

    @classmethod
    def _of_number(cls, box: Box, handle: Tensor, device: torch.device) -> RemoteTensor:
        made = cls(handle.dtype, device, handle.requires_grad)
        made._box, made._handle = box, handle
        return made

    # ---- looking

    def fetch(self) -> Tensor:
        """The values as a plain tensor `[rows, ...]` on the output device, with the graph attached; once, then kept."""
        if self._value is None:
            with wide():
                if self._box is not None:
                    real, handle = self._box.look(), self.handle()
                    self._value = apply(Substitute, handle, real) if handle.requires_grad else real
                elif self._original is not None:
                    self._value = self._original.fetch().detach()
                else:
                    assert self._call is not None
                    self._value = self._call.fetch(self._leaf, self._hook())
                self._born = self._value._version
        return self._value

    @property
    def shards(self) -> list[Tensor]:
        """The values of each replica that had rows, in order, each with the graph attached. One message per worker."""
        if self._call is None:
            return [s.detach() for s in self._original.shards] if self._original is not None else [self.fetch()]
        with wide():
            return self._call.shards(self._leaf, self._hook())

    def is_known(self) -> bool:
        """Whether reading the value would neither wait nor send."""
        if self._box is not None:
            return self._box.real is not None or self._box.term.is_known()
        return self._value is not None or (self._original is not None and self._original.is_known())

    def true_shape(self) -> torch.Size:
        """The shape; may wait for metadata."""
        if self._value is not None:
            return self._value.shape
        origin = self if self._original is None else self._original
        return origin._call.shape(origin._leaf) if origin._call is not None else torch.Size(())

    def known_ndim(self) -> int | None:
        """The number of dimensions where it is known without waiting."""
        origin = self if self._original is None else self._original
        if origin._value is not None:
            return None
        return origin._call.kind(origin._leaf).ndim if origin._call is not None else 0

    def wants_grad(self) -> bool:
        """Whether a backward through this reaches parameters or inputs."""
        if self._value is not None:
            return self._value.requires_grad
        return self._handle.requires_grad if self._handle is not None else self._differentiable()

    # ---- staying remote

    def is_scalar(self) -> bool:
        """Whether this is a 0-dim float, so that linear arithmetic may stay remote."""
        return self._box is not None

    def handle(self) -> Tensor:
        """The driver's stand-in for a scalar: a 0-dim tensor whose gradient is this one's."""
        if self._handle is None:
            with wide():
                assert self._call is not None
                token = torch.zeros(()) if self._token is None else self._token.tensor()
                self._handle = self._call.stand_in(self._leaf, token)
        return self._handle

    def source(self) -> tuple[Source, int, bool] | None:
        """(call, leaf, differentiable) if the rows still lie on the workers as they are here, and nobody wants to see
        their gradient, so that another call may take them there.
        """
        origin = self if self._original is None else self._original
        call = origin._call
        if call is None or call.kind(origin._leaf).ndim <= 0 or self._watched:
            return None
        if any(t._exposed or t.is_changed() for t in (self, origin)):
            return None
        if self._value is not None and self._value.requires_grad != self._differentiable():
            return None
        return call, origin._leaf, self._differentiable()

    def is_changed(self) -> bool:
        """Whether the fetched values were changed in place."""
        return self._value is not None and self._value._version != self._born

    def feed(self) -> None:
        """Note that another call took the rows, and will hand its gradient to the workers."""
        self._fed = True

    def _hook(self) -> Tensor | None:
        return None if self._token is None else self._token.tensor()

    def _untouched(self) -> Source | None:
        """The call of a scalar that is as it was returned."""
        return self._call if self._box is not None and self._handle is None and not self._watched else None

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
            if not kwargs:
                found = _written(func, args) if func in IN_PLACE else _expression(func, args)
                if found is not NotImplemented:
                    return found
            if func in EXPOSING:
                _expose(args)
        values = pytree.tree_map(lambda x: x.fetch() if isinstance(x, RemoteTensor) else x, (args, kwargs))
        return func(*values[0], **values[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
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

    def as_subclass(self, cls: type[Any]) -> Any:
        """See torch; of the fetched values."""
        return self.fetch().as_subclass(cls)

    def __format__(self, spec: str) -> str:
        return format(self.fetch(), spec)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self.fetch())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.fetch(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetch().__reduce_ex__(protocol)


def has_mean(kind: LeafKind) -> bool:
    """Whether values of a leaf have a mean: floats and complex numbers."""
    dtype: torch.dtype = getattr(torch, kind.dtype)
    return dtype.is_floating_point or dtype.is_complex


# ---- expressions of scalars

T = torch.Tensor


def _expression(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result as another remote scalar where it is linear in them and all else are plain numbers."""
    parts = linear(func, args)
    if parts is None:
        return NotImplemented
    term, handle = parts
    term.settle()
    return RemoteTensor._of_number(Box(term), handle, next(a for a in args if isinstance(a, RemoteTensor)).device)


def _written(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """An in-place operation on an unfetched scalar, whose memory gets another term."""
    self = args[0]
    lazy = isinstance(self, RemoteTensor) and self._box is not None and self._box.real is None
    parts = linear(IN_PLACE[func], args) if lazy and not self._watched else None
    if parts is None or parts[1].dtype != self.dtype:
        return NotImplemented
    term, handle = parts
    term.settle()
    if torch.is_grad_enabled():
        self._handle = handle
        if handle.requires_grad and not T.requires_grad.__get__(self):  # type: ignore[attr-defined]
            T.requires_grad_(self)
    else:
        self.handle()
    self._box.term = term
    return self


# ---- backward, hooks, detach


def _backward(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and all(v is None or v is False for k, v in kwargs.items() if k != "retain_graph"):
        call = self._untouched()
        if call is not None and call.backward_from(self._leaf, bool(kwargs.get("retain_graph"))):
            return None
    given = kwargs.get("inputs", args[4] if len(args) > 4 else None)
    root = _root(self)
    if given is not None:
        _check_inputs((root,), given)
        kwargs = {**kwargs, "inputs": _points(given)}
    gradient = kwargs.get("gradient")
    if isinstance(gradient, RemoteTensor):
        kwargs = {**kwargs, "gradient": gradient.fetch()}
    back: Any = T.backward
    return back(root, *[a.fetch() if isinstance(a, RemoteTensor) else a for a in args[1:]], **kwargs)


def _root(x: Any) -> Any:
    """What a gradient comes from or goes to: the stand-in of a scalar, else the value."""
    if not isinstance(x, RemoteTensor):
        return x
    return through(x) if x._box is not None else x.fetch()


def _points(tree: Any) -> Any:
    return pytree.tree_map(_root, tree)


def _check_inputs(roots: Sequence[Any], inputs: Any) -> None:
    for x in pytree.tree_leaves(inputs):
        if getattr(x, "is_remote_parameter", False):
            raise UnsupportedError(
                "gradients with respect to parameters of the remote model arrive in their .grad by loss.backward(); "
                "for torch.autograd.grad compute them on the workers with model.run"
            )
        if not (isinstance(x, RemoteTensor) and x._call is not None and x._differentiable()):
            continue
        if x._fed or reaches_another(roots, x._call, x._leaf):
            raise UnsupportedError(_PARTIAL)


_PARTIAL = (
    "the gradient of this output is known to the workers only, in part: another call took it, or other outputs of the "
    "same call take part in the backward. Give .fetch() of it to the call, set the hook before the call, or look at "
    "the gradient inside the module"
)


def _engine(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.backward and grad: their roots may stay remote."""
    name = "tensors" if func is torch.autograd.backward else "outputs"
    kwargs = dict(kwargs)
    given = args[0] if args else kwargs.pop(name)
    single = not isinstance(given, Sequence) or isinstance(given, Tensor)
    roots = (_root(given),) if single else tuple(map(_root, given))
    inputs = args[1] if func is torch.autograd.grad and len(args) > 1 else kwargs.get("inputs")
    _check_inputs(roots, inputs)
    return func(roots, *_points(args[1:]), **_points(kwargs))


def _detach(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if self._box is not None:
        with torch.inference_mode(False):
            return RemoteTensor._of_number(self._box, torch.zeros((), dtype=self.dtype), self.device)
    if self.source() is None:
        return NotImplemented
    made = RemoteTensor(self.dtype, self.device, False)
    made._original = self if self._original is None else self._original
    return made


def _watch(act: Callable[..., Any]) -> Callable[..., Any]:
    """register_hook and retain_grad: the gradient has to come by here."""

    def watch(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._fed:
            raise UnsupportedError(_PARTIAL)
        target = _root(self)
        found = act(target, *args[1:], **kwargs)
        self._watched = True
        if self._call is not None and self._differentiable():
            self._call.watch(self._leaf)
        return found

    return watch


def _grad(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if self._watched:
        return _root(self).grad
    return NotImplemented if self._value is not None else None


def _retains(self: RemoteTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _root(self).retains_grad if self._watched else NotImplemented


def _expose(args: tuple[Any, ...]) -> None:
    for x in args[:1]:
        if isinstance(x, RemoteTensor):
            x._exposed = True
            if x._original is not None:
                x._original._exposed = True


_SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **LOOKS,
    T.backward: _backward,
    T.detach: _detach,
    torch.detach: _detach,
    T.register_hook: _watch(T.register_hook),
    T.retain_grad: _watch(T.retain_grad),
    T.grad.__get__: _grad,  # type: ignore[union-attr]
    T.retains_grad.__get__: _retains,  # type: ignore[attr-defined]
}
_ENGINE = frozenset((torch.autograd.backward, torch.autograd.grad))

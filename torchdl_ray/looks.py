"""What a RemoteTensor answers without its values: shape, dtype, whether it requires grad, its hash.

Runs on the driver. `LOOKS` maps torch functions to functions of (tensor, args, kwargs). Costs nothing, except that a
shape waits for its call, and asks the workers once where they did not tell it unasked.

Invariant: each answers as the fetched tensor would, or NotImplemented, and then the values are fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

T = torch.Tensor
Look = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _shape(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return self.true_shape()


def _size(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    shape = self.true_shape()
    return shape if dim is None else NotImplemented if not shape else shape[dim]


def _ndim(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    known = self.known_ndim()
    return len(self.true_shape()) if known is None else known


def _numel(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return self.true_shape().numel()


def _length(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = self.true_shape()
    return shape[0] if shape else NotImplemented


def _requires_grad(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return self.wants_grad()


def _number(get: Callable[..., Any]) -> Look:
    """A look at the number alone; torch would warn of a graph that such a look loses."""
    return lambda self, args, kwargs: get(self.fetch().detach(), *args[1:], **kwargs)


def _plain(get: Callable[..., Any]) -> Look:
    return lambda self, args, kwargs: get(*args, **kwargs)


def _slot(descriptor: Any) -> Any:
    return descriptor.__get__


LOOKS: dict[Any, Look] = {
    _slot(T.shape): _shape,
    T.size: _size,
    _slot(T.ndim): _ndim,
    T.dim: _ndim,
    T.ndimension: _ndim,
    T.numel: _numel,
    T.nelement: _numel,
    torch.numel: _numel,
    T.__len__: _length,
    _slot(T.requires_grad): _requires_grad,
    T.item: _number(T.item),
    T.__float__: _number(T.__float__),
    T.__int__: _number(T.__int__),
    T.__bool__: _number(T.__bool__),
    T.__complex__: _number(T.__complex__),
    _slot(T.dtype): _plain(_slot(T.dtype)),
    _slot(T.device): _plain(_slot(T.device)),
    T.__hash__: _plain(T.__hash__),
    T.is_floating_point: _plain(T.is_floating_point),
    torch.is_floating_point: _plain(torch.is_floating_point),
    T.is_complex: _plain(T.is_complex),
    torch.is_complex: _plain(torch.is_complex),
    T.element_size: _plain(T.element_size),
}

# what gives away memory, so that it may be changed without any trace
EXPOSING = frozenset(
    (
        _slot(T.data),
        T.data.__set__,  # type: ignore[attr-defined]
        T.numpy,
        T.__array__,
        T.data_ptr,
        T.storage,
        T.untyped_storage,
        T.__dlpack__,
        T.set_,
    )
)

"""Which operations on remote scalars stay remote: those linear in them, with all else plain numbers.

Runs on the driver. Of each the value (a `Term`) and the stand-in, through which the gradient goes, are made; neither
looks at a value that is not here.

Invariant: the term's value is what torch would have computed at this moment, whatever is written later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .scalar import Term, constant

NUMBERS = (int, float, bool)

T = torch.Tensor
_ADD = (T.add, T.__add__, T.__radd__, T.sub, T.__sub__, T.__rsub__, torch.add, torch.sub)
_MULTIPLY = (T.mul, T.__mul__, T.__rmul__, torch.mul)
_DIVIDE = (T.div, T.__truediv__, T.true_divide, torch.div, torch.true_divide)
_ONE = (T.neg, T.__neg__, torch.neg, T.mean, T.sum, torch.mean, torch.sum, T.clone, torch.clone)
LINEAR = frozenset((*_ADD, *_MULTIPLY, *_DIVIDE, *_ONE))
IN_PLACE: dict[Any, Callable[..., Any]] = {
    T.__iadd__: T.add,
    T.add_: T.add,
    T.__isub__: T.sub,
    T.sub_: T.sub,
    T.__imul__: T.mul,
    T.mul_: T.mul,
    T.__itruediv__: T.div,
    T.div_: T.div,
}


def linear(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Term, Tensor] | None:
    """The value and the stand-in of a linear function of remote scalars, None where it is not one."""
    if func not in LINEAR or not all(isinstance(x, NUMBERS) or _is_number(x) for x in args):
        return None
    if not any(box_of(x) is not None for x in args):
        return None
    varying = sum(isinstance(x, Tensor) and _has_graph(x) for x in args)
    several = func in _MULTIPLY and varying > 1
    divided = func in _DIVIDE and len(args) == 2 and isinstance(args[1], Tensor) and _has_graph(args[1])
    if len(args) != (1 if func in _ONE else 2) or several or divided:
        return None
    scaling = func in _MULTIPLY or func in _DIVIDE
    if scaling and any(_unknown(x) and not _has_graph(x) and varying for x in args):
        return None  # the factor has to be known
    terms, handles = [], []
    for x in args:
        if not isinstance(x, Tensor):
            terms.append(x)
            handles.append(x)
        elif (box := box_of(x)) is not None:
            terms.append(box.snapshot())
            factor = box.real if scaling and not _has_graph(x) else None
            handles.append(through(x) if factor is None else factor.clone())
        else:
            terms.append(constant(x))
            handles.append(x if x.requires_grad else x.clone())
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        return Term(func, *terms), func(*handles)


def _is_number(x: Any) -> bool:
    if box_of(x) is not None:
        return True
    plain = type(x) is Tensor and x.ndim == 0 and x.device.type == "cpu"
    return plain and not x.is_inference() and has_float(x)


def box_of(x: Any) -> Any:
    """The memory of a remote scalar, None for anything else."""
    return getattr(x, "_box", None)


def has_float(x: Tensor) -> bool:
    """Whether a tensor's values are floats or complex numbers."""
    return x.is_floating_point() or x.is_complex()


def _unknown(x: Any) -> bool:
    return box_of(x) is not None and box_of(x).real is None


def _has_graph(x: Any) -> bool:
    if not torch.is_grad_enabled():
        return False
    return bool(x.requires_grad if box_of(x) is None else x.wants_grad())


def through(x: Any) -> Tensor:
    """Where a gradient with respect to a scalar goes: its stand-in, or its value if that was changed in place."""
    found: Tensor = x.fetch() if x.is_changed() else x.handle()
    return found

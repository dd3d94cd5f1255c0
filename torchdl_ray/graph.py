"""The driver's autograd graph beneath RemoteTensors: modes in which values are fetched, stand-ins, and who is reached.

Runs on the driver; nothing crosses.

Invariant: second derivatives do not pass through a call of the remote model; they raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import UnsupportedError


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


class Substitute(torch.autograd.Function):
    """A value in place of its stand-in, sharing the value's memory; the gradient goes on to the stand-in."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, value: Tensor) -> Tensor:
        return value.new_empty(()).set_(value)  # type: ignore[call-overload,no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def reaches_another(roots: Sequence[Any], call: Any, leaf: int) -> bool:
    """Whether a backward from `roots` comes by another output of `call` than the joined value of `leaf`, which might
    depend on it on the workers. Nodes of outputs carry `call`, `leaf` and `whole` (see remote_call.py).
    """
    seen: set[Any] = set()
    rest = [x.grad_fn for x in roots if isinstance(x, Tensor) and x.grad_fn is not None]
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if getattr(node, "call", None) is call and hasattr(node, "leaf") and not (node.whole and node.leaf == leaf):
            return True
        rest += [following for following, _ in node.next_functions if following is not None]
    return False

"""The driver's autograd graph beneath RemoteTensors: the nodes of a call, stand-ins, and who is reached.

Runs on the driver; nothing crosses.

Invariant: second derivatives do not pass through a call of the remote model; they raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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


def apply(function: Any, *args: Any) -> Tensor:
    """`function.apply(*args)`, typed."""
    made: Tensor = function.apply(*args)
    return made


class Substitute(torch.autograd.Function):
    """A value in place of its stand-in, sharing the value's memory; the gradient goes on to the stand-in."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        return value.new_empty(()).set_(value)  # type: ignore[call-overload,no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: D102
        return grad, None


def reaches_another(roots: Sequence[Any], call: Any, leaf: int) -> bool:
    """Whether a backward from `roots` comes by another output of `call` than the joined value of `leaf`, which might
    depend on it on the workers. Nodes of outputs carry `call`, `leaf` and `whole` (see remote_call.py).
    """
    seen: set[Any] = set()
    rest: list[Any] = [x.grad_fn for x in roots if isinstance(x, Tensor) and x.grad_fn is not None]
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if (
            getattr(node, "call", None) is call
            and hasattr(node, "leaf")
            and not (getattr(node, "whole", False) and node.leaf == leaf)
        ):
            return True
        rest += [following for following, _ in node.next_functions if following is not None]
    return False


class Anchor(torch.autograd.Function):
    """The node of a call; runs after all of its outputs' nodes."""

    @staticmethod
    def forward(ctx: Any, call: Any, theta: Tensor, *edges: Tensor) -> Tensor:  # noqa: D102
        ctx.call = call
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: D102
        no_double_backward()
        call = ctx.call
        full = torch._C._will_engine_execute_node(call.theta_node)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        return (None, None, *call.run_backward(keep, full, ctx.needs_input_grad[2:]))


class Token:
    """The anchor of a call, made when something first hangs on it: a loss that goes backward by itself needs none."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make: Callable[[], Tensor] | None = make
        self._made: Tensor | None = None

    def tensor(self) -> Tensor:
        """The 0-dim tensor that outputs take as an input."""
        if self._made is None:
            assert self._make is not None
            with wide():
                self._made = self._make()
            self._make = None
        return self._made


class Output(torch.autograd.Function):
    """The joined value of a leaf, or a stand-in for it: stashes its gradient with the call."""

    @staticmethod
    def forward(ctx: Any, call: Any, leaf: int, token: Tensor, real: bool) -> Tensor:  # noqa: D102
        ctx.call, ctx.leaf, ctx.whole = call, leaf, True
        return call.value(leaf) if real else torch.zeros((), dtype=getattr(torch, call.kind(leaf).dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: D102
        no_double_backward()
        ctx.call.stash.add(ctx.leaf, grad)
        return None, None, torch.zeros(()), None


class Shard(torch.autograd.Function):
    """One replica's value of a leaf."""

    @staticmethod
    def forward(ctx: Any, call: Any, leaf: int, rank: int, token: Tensor, value: Tensor) -> Tensor:  # noqa: D102
        ctx.call, ctx.leaf, ctx.rank, ctx.whole = call, leaf, rank, False
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: D102
        no_double_backward()
        ctx.call.stash.add_shard(ctx.leaf, ctx.rank, grad)
        return None, None, None, torch.zeros(()), None


class RemoteLink(torch.autograd.Function):
    """A leaf of an earlier call as an input of a later one: its gradient stays on the workers."""

    @staticmethod
    def forward(ctx: Any, call: Any, token: Tensor) -> Tensor:  # noqa: D102
        ctx.call = call
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: D102
        return None, torch.zeros(())

"""Remote numbers: the values of 0-dim outputs, and linear expressions of them, that nobody has looked at yet.

Runs on the driver. A number comes home with the reply of the call that made it, so nothing is sent for it; a `Term`
says how it is computed from such numbers. Nothing here knows of gradients: those go through the handles of
remote_tensor.py.

Invariant: a term never changes its value; an in-place operation puts another term into the `Box` that several tensors
may share, as they would share memory. Terms hold no call alive on the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

SETTLE_DEPTH = 16  # of an expression, before what is known of it is computed
MAX_DEPTH = 64  # before it is computed, waiting for what is missing


class Numbers(Protocol):
    """Where numbers come from: the answer to a command."""

    def number(self, leaf: int) -> Tensor:
        """The 0-dim value of a leaf; may wait, sends nothing but what was recorded."""

    def is_known(self, leaf: int) -> bool:
        """Whether `number` would return at once."""


class Term:
    """A number: one of an answer, or a function of other terms, numbers and constant tensors."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, source: Numbers | None = None) -> None:
        self._function, self._arguments, self._source = function, arguments, source
        self._value: Tensor | None = None
        self.depth = 0
        if source is None:
            self.depth = 1 + max((a.depth for a in arguments if isinstance(a, Term)), default=-1)

    @classmethod
    def read(cls, source: Numbers, leaf: int) -> Term:
        """The number of a leaf of an answer."""
        return cls(source.number, leaf, source=source)

    def is_known(self) -> bool:
        """Whether `value` would neither wait nor send."""
        return self._settle({}, compute=False)

    def settle(self) -> None:
        """Keep the depth bounded: compute what is known, and everything once the expression is too deep."""
        if self.depth > SETTLE_DEPTH:
            self._settle({}, compute=True)
        if self.depth > MAX_DEPTH:
            self.value()

    def _settle(self, seen: dict[int, bool], compute: bool) -> bool:
        if self._value is not None:
            return True
        if id(self) not in seen:
            if self._source is not None:
                known = self._source.is_known(self._arguments[0])
            else:
                terms = [a for a in self._arguments if isinstance(a, Term)]
                known = all([t._settle(seen, compute) for t in terms])  # noqa: C419 - each of them
                self.depth = 1 + max((t.depth for t in terms), default=-1)
            if known and compute:
                self.value()
            seen[id(self)] = known
        return seen[id(self)]

    def value(self) -> Tensor:
        """The value, computed once; not to be written."""
        if self._value is None:
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
                made = self._function(*[a.value() if isinstance(a, Term) else a for a in self._arguments])
            self._value = made
            self._arguments, self._source, self.depth = (), None, 0
        return self._value


class Box:
    """The memory of one number, which a tensor shares with those detached from it: a term, and once somebody looked,
    a real tensor.
    """

    def __init__(self, term: Term) -> None:
        self.term = term
        self.real: Tensor | None = None

    def look(self) -> Tensor:
        """The memory itself, without a graph."""
        if self.real is None:
            self.real = self.term.value().clone()
        return self.real

    def snapshot(self) -> Term:
        """The number as it is now, whatever happens to the memory later."""
        return self.term if self.real is None else constant(self.real)


def constant(tensor: Tensor) -> Term:
    """A term with the present value of a tensor."""
    kept = tensor.detach().clone()
    term = Term(lambda: kept)
    term.value()
    return term

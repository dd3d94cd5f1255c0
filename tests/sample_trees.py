"""Containers of many kinds, and when two trees are the same."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import torch

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Batch:
    x: Any
    mask: Any = None
    total: int = dataclasses.field(init=False, default=7)

    def __post_init__(self) -> None:
        self.note = "not a field"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    inner: Any = None
    late: Any = dataclasses.field(init=False, repr=False)


@dataclasses.dataclass
class Output(OrderedDict):
    """As transformers' ModelOutput: fields that are not None are items as well."""

    loss: Any = None
    logits: Any = None
    states: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("rebuilding shall not call this")


class Attributes(UserDict):
    pass


def same(left: Any, right: Any) -> bool:
    """Equal in classes, dtypes, shapes, values and attributes."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool(torch.equal(left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict) and not (list(left) == list(right) and all(same(left[k], right[k]) for k in left)):
        return False
    if isinstance(left, list | tuple | deque):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    names = [*getattr(left, "__dict__", {}), *getattr(type(left), "__slots__", ())]
    if dataclasses.is_dataclass(left) or isinstance(left, dict | UserDict):
        return all(
            hasattr(left, n) == hasattr(right, n) and same(getattr(left, n, 0), getattr(right, n, 0)) for n in names
        )
    return bool(left == right)


def containers(x: torch.Tensor) -> dict[str, Any]:
    return {
        "dict": {"b": x, "a": None, 3: [x, "text"]},
        "ordered": OrderedDict(z=x, a=(x, 1.5)),
        "default": defaultdict(list, x=x),
        "deque": deque([x, None], maxlen=4),
        "namedtuple": Pair(x, {"y": x}),
        "dataclass": Batch(x, [x, None]),
        "frozen": Frozen(x, Batch(x)),
        "output": Output(logits=x),
        "output in full": Output(loss=x.sum(), logits=x, states=(x, x)),
        "userdict": Attributes(x=x),
        "structseq": torch.max(x, 1),
        "empty": [(), {}, []],
        "leaf": x,
    }

"""What a stock optimizer's step runs on, on the driver, while the workers do the real one.

Runs on the driver. Nothing crosses. The stand-in has the optimizer's class and attributes and only the driver's own
parameters, so the user's code runs once on the driver as well: it counts, logs and returns as it would without workers.

Invariant: no remote parameter is reachable from a stand-in's groups, state, or lists and dicts of its attributes.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .adoption import APART, HOOK_NAMES, is_plain
from .remote_gradient import RemoteGradient
from .remote_parameter import hub_of


class StandIn:
    """What the stock step runs on while the workers do the real one: the optimizer with the driver's own parameters.

    Args:
        optimizer: the driver's object.
        own: for each group the driver's own parameters.
        state: their state.
        fill: give groups that would be empty one number as a parameter, and keep attributes apart, for classes whose
            step fails without parameters.
    """

    def __init__(
        self, optimizer: Optimizer, own: list[list[Tensor]], state: collections.defaultdict[Any, Any], fill: bool
    ) -> None:
        self._fill = fill
        attributes = {k: _without_remote(v) for k, v in optimizer.__dict__.items() if k not in APART}
        if fill:
            attributes = {k: copy.deepcopy(v) if is_plain(v) else v for k, v in attributes.items()}
        attributes |= {name: collections.OrderedDict() for name in HOOK_NAMES}
        attributes["param_groups"] = [
            {**g, "params": list(params)} for g, params in zip(optimizer.param_groups, own, strict=True)
        ]
        attributes["state"] = copy.copy(state) if fill else state
        if fill:
            for group, stock in zip(attributes["param_groups"], optimizer.param_groups, strict=True):
                group["params"] = group["params"] or [_filler(p) for p in stock["params"][:1]]
        self._before = dict(attributes)
        self._shared = {k for k, v in attributes.items() if v is optimizer.__dict__.get(k)}
        self.optimizer: Optimizer = object.__new__(type(optimizer))
        self.optimizer.__dict__.update(attributes)

    def containers(self) -> dict[str, Any]:
        """Attributes that the step may have changed in place."""
        return {
            k: v
            for k, v in self.optimizer.__dict__.items()
            if k not in APART
            and isinstance(v, list | dict | set | Tensor | collections.deque)
            and v is self._before.get(k)
            and (self._fill or k in self._shared)
        }

    def changes(self, optimizer: Optimizer) -> tuple[dict[str, Any], list[tuple[dict[str, Any], str, Any]], list[str]]:
        """Set counters, and objects that cannot come from a worker, on `optimizer` as they are here.

        Returns: those of its attributes, those of its groups, and the names of all else that changed, whose values only
            the workers know.
        """
        attributes: dict[str, Any] = {}
        groups: list[tuple[dict[str, Any], str, Any]] = []
        others: list[str] = []
        for name, value in self.optimizer.__dict__.items():
            if name not in APART and value is not self._before.get(name):
                if _is_counter(value) or not is_plain(value):
                    optimizer.__dict__[name] = attributes[name] = value
                else:
                    others.append(name)
        for group, mine in zip(optimizer.param_groups, self.optimizer.param_groups, strict=False):
            for key, value in mine.items():
                if key != "params" and value is not group.get(key):
                    if _is_counter(value) or not is_plain(value):
                        group[key] = value
                        groups.append((group, key, value))
                    else:
                        others.append(key)
        return attributes, groups, others


def idle(optimizer: Optimizer) -> Optimizer:
    """What the step of one of torch's own classes runs on where all parameters are remote: without groups it does
    nothing, and changes nothing that would have to be noted.
    """
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in APART})
    made.__dict__.update({name: collections.OrderedDict() for name in HOOK_NAMES})
    made.__dict__.update(param_groups=[], state={})
    return made


def _is_counter(value: Any) -> bool:
    return value is None or isinstance(value, int | str)


def _filler(p: Tensor) -> Tensor:
    filler = torch.nn.Parameter(torch.ones((1,) * p.ndim, dtype=p.dtype))
    filler.grad = torch.ones_like(filler)
    return filler


def _without_remote(value: Any) -> Any:
    """A list, tuple or dict without remote parameters, and ones in the place of one; else the object itself."""
    if isinstance(value, dict):
        own = {k: v for k, v in value.items() if not _is_remote_tensor(k) and not _is_remote_tensor(v)}
        kept = {k: _without_remote(v) for k, v in own.items()}
        return value if len(kept) == len(value) and all(kept[k] is v for k, v in value.items()) else kept
    if _is_remote_tensor(value):
        return torch.ones(value.shape, dtype=value.dtype)
    if type(value) in (list, tuple):
        items = [_without_remote(v) for v in value if not _is_remote_tensor(v)]
        return value if len(items) == len(value) and all(map(_is, items, value)) else type(value)(items)
    return value


def _is(a: Any, b: Any) -> bool:
    return a is b


def _is_remote_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and hub_of(value) is not None


def runs_empty(optimizer: Optimizer, state: Mapping[Any, Any]) -> bool:
    """Try the step of a user's class without parameters, on a stand-in whose state and attributes are copies."""
    none: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    shared = collections.defaultdict(dict, {k: copy.deepcopy(v) for k, v in state.items() if not isinstance(k, Tensor)})
    trial = StandIn(optimizer, none, shared, fill=False).optimizer
    for name, value in trial.__dict__.items():
        if name not in APART and is_plain(value):
            trial.__dict__[name] = copy.deepcopy(value)
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    try:
        step(trial)
    except Exception:
        return False
    return True


def fetch_handles(optimizer: Optimizer) -> None:
    """Bring home values that a step on the driver made of gradients and kept in the state: they would go with the
    workers.
    """

    def fetched(value: Any) -> Any:
        if isinstance(value, RemoteGradient):
            return value.fetch().clone()
        if type(value) is dict:
            value.update({k: f for k, v in value.items() if (f := fetched(v)) is not v})
        elif type(value) is list:
            value[:] = map(fetched, value)
        elif type(value) is tuple:
            items = tuple(map(fetched, value))
            return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
        return value

    for entry in optimizer.state.values():
        fetched(entry)
    for name, value in optimizer.__dict__.items():
        if name not in APART:
            optimizer.__dict__[name] = fetched(value)

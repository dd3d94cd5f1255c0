"""Stock optimizers on their way to the workers and back.

Runs on both sides. The driver ships the optimizer's class and full `__dict__` (its `__getstate__` would drop attributes
of subclasses), with parameters by name; the worker rebuilds it around its own parameters. Afterwards a step sends only
the groups that changed, in absolute values; state comes home when somebody looks at it.

Invariant: the optimizer on a worker holds exactly the groups, hyperparameters and state of the driver's one, as of the
last `Step`.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ray import cloudpickle
from torch import Tensor
from torch.optim import Optimizer

from .shipping import Shipment, ship, unship

# What belongs to the driver's object: its hooks, and `step` as patched by schedulers.
HOOK_NAMES = tuple(k for k in torch.optim.SGD([torch.zeros(1)], lr=1.0).__dict__ if k.endswith("_hooks"))
DRIVER_ONLY = frozenset(HOOK_NAMES) | {"step", "zero_grad", "state_dict", "load_state_dict"}


def rebuild(cls: type[Optimizer], attributes: dict[str, Any]) -> Optimizer:
    """An optimizer of class `cls` with these attributes and no hooks."""
    optimizer: Optimizer = object.__new__(cls)
    optimizer.__dict__.update(attributes)
    for name in HOOK_NAMES:
        optimizer.__dict__.setdefault(name, collections.OrderedDict())
    optimizer._patch_step_function()
    return optimizer


def ship_optimizer(optimizer: Optimizer, name_of: Callable[[Tensor], str | None], private: frozenset[str]) -> Shipment:
    """The optimizer, restricted to the parameters that `name_of` knows.

    Args:
        optimizer: any subclass of torch.optim.Optimizer; optimizers inside it (Lookahead, SAM) travel along.
        name_of: the name that the workers know a parameter by, or None.
        private: attributes of the driver's object that stay there.
    """

    def reduction(obj: Any) -> Any:
        if not isinstance(obj, Optimizer):
            return None
        attributes = {k: v for k, v in obj.__dict__.items() if k not in DRIVER_ONLY and k not in private}
        if obj is optimizer:
            attributes["param_groups"] = [
                {**g, "params": [p for p in g["params"] if name_of(p) is not None]} for g in obj.param_groups
            ]
            attributes["state"] = collections.defaultdict(
                dict, {p: v for p, v in obj.state.items() if isinstance(p, Tensor) and name_of(p) is not None}
            )
        return rebuild, (type(obj), attributes)

    return ship(optimizer, name_of, reduction)


def build_optimizer(shipment: Shipment, known: Mapping[str, Tensor]) -> Optimizer:
    """The optimizer on the worker, its state where the stock `load_state_dict` would put it."""
    optimizer: Optimizer = unship(shipment, known)
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and isinstance(p, Tensor) and value.device != p.device and key != "step":
                state[key] = value.to(p.device)
    return optimizer


def pack_groups(groups: list[tuple[int, dict[str, Any], list[str]]], total: int) -> bytes:
    """Groups that changed, as (index, hyperparameters, names of the parameters), and how many there are."""
    return bytes(cloudpickle.dumps((groups, total)))


def apply_groups(optimizer: Optimizer, body: bytes, known: Mapping[str, Tensor]) -> None:
    """Set the groups on the worker as the driver's are."""
    groups, total = pickle.loads(body)
    for index, hyperparameters, names in groups:
        while index >= len(optimizer.param_groups):
            optimizer.param_groups.append({"params": []})
        group = optimizer.param_groups[index]
        group["params"] = [known[name] for name in names]
        for key in group.keys() - hyperparameters.keys() - {"params"}:
            del group[key]
        group.update(hyperparameters)
    del optimizer.param_groups[total:]


def ship_state(optimizer: Optimizer, name_of: Callable[[Tensor], str | None]) -> Shipment:
    """The state by parameter name, and the attributes that a step may have changed; tensors in the shipment's arrays."""
    state = {name_of(p) if isinstance(p, Tensor) else p: dict(v) if isinstance(v, dict) else v for p, v in optimizer.state.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return ship({"state": state, "groups": groups}, name_of)


def read_state(shipment: Shipment, known: Mapping[str, Tensor]) -> dict[str, Any]:
    """What `ship_state` sent: {"state": {name: {key: value}}, "groups": [hyperparameters]}."""
    found: dict[str, Any] = unship(shipment, known)
    return found

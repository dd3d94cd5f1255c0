"""Stock optimizers on their way to the workers and back.

Runs on both sides. The driver ships the optimizer's class and full `__dict__` (its `__getstate__` would drop attributes
of subclasses), with parameters by name; the worker rebuilds it around its own parameters. Afterwards a step sends only
what changed, in absolute values; state comes home when somebody looks at it. What crosses: one `Shipment` at adoption
and one per look, some bytes with a step whose hyperparameters changed, nothing with other steps.

Groups have numbers, so that a removed or reordered group is told from a changed one.

Invariant: the optimizer on a worker holds exactly the groups, hyperparameters and state of the driver's one, as of the
last `Step`.
"""

from __future__ import annotations

import collections
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .errors import UnsupportedError
from .shipping import Shipment, ship, unship

# What belongs to the driver's object: its hooks, and its methods as patched by schedulers and by ourselves.
HOOK_NAMES = tuple(k for k in torch.optim.SGD([torch.zeros(1)], lr=1.0).__dict__ if k.endswith("_hooks"))
DRIVER_ONLY = frozenset(HOOK_NAMES) | {"step", "zero_grad", "state_dict", "load_state_dict", "_opt_called"}
# What travels by itself, not as an attribute; the numbers of the groups exist on the workers only.
GROUP_IDS = "_torchdl_group_ids"
APART = DRIVER_ONLY | {"param_groups", "state", GROUP_IDS}

Names = Callable[[Tensor], str | None]


@dataclass(frozen=True, slots=True)
class GroupChange:
    """What changed in group `id`: values set, keys removed, and its parameters (None where they stayed)."""

    id: int
    values: dict[str, Any]
    removed: tuple[str, ...] = ()
    members: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed in an optimizer; `order` lists all groups by number."""

    order: tuple[int, ...]
    groups: tuple[GroupChange, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))


def is_plain(value: Any) -> bool:
    """True for numbers, strings, tensors and containers of them: what can be compared and travel both ways."""
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return all(type(v) in _ATOMS or is_plain(v) for v in value)
    if isinstance(value, dict):
        return is_plain(list(value)) and is_plain(list(value.values()))
    return value is None or isinstance(value, Tensor | bool | int | float | complex | str | bytes)


def rebuild(cls: type[Optimizer], attributes: dict[str, Any]) -> Optimizer:
    """An optimizer of class `cls` with these attributes and no hooks."""
    optimizer: Optimizer = object.__new__(cls)
    optimizer.__dict__.update(attributes)
    for name in HOOK_NAMES:
        optimizer.__dict__[name] = collections.OrderedDict()
    optimizer._patch_step_function()
    return optimizer


def rehook(function: Callable[..., Any]) -> Callable[..., Any]:
    """A `step` that runs the hooks of the process it is in. Torch's wrapper would carry those of the driver along."""
    hooked = Optimizer.profile_hook_step(function)
    hooked.hooked = True  # type: ignore[attr-defined]
    return hooked


def ship_optimizer(
    optimizer: Optimizer,
    name_of: Names,
    state: Mapping[Any, Any] | None = None,
    groups: Sequence[tuple[int, dict[str, Any]]] | None = None,
) -> Shipment:
    """The optimizer, restricted to the parameters that `name_of` knows.

    Args:
        optimizer: any subclass of torch.optim.Optimizer.
        name_of: the name that the workers know a parameter by, or None.
        state: the state to ship (None: the optimizer's own); entries of unknown parameters stay.
        groups: the groups to ship, by number (None: all, under the numbers that they have on a worker).
    Raises:
        UnsupportedError: an attribute cannot be pickled; names it.
    """

    own = optimizer.state if state is None else state
    numbered = groups or list(zip(optimizer.__dict__[GROUP_IDS], optimizer.param_groups, strict=True))

    def mine(group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [p for p in group["params"] if name_of(p) is not None]}

    def reduction(obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and getattr(obj, "hooked", False) and hasattr(obj, "__wrapped__"):
            return rehook, (obj.__wrapped__,)
        if not isinstance(obj, Optimizer):
            return None
        attributes = {k: v for k, v in obj.__dict__.items() if k not in DRIVER_ONLY}
        if obj is optimizer:
            attributes["param_groups"] = [mine(group) for _, group in numbered]
            known = {k: v for k, v in own.items() if not isinstance(k, Tensor) or name_of(k) is not None}
            attributes["state"] = collections.defaultdict(dict, known)
            attributes[GROUP_IDS] = [number for number, _ in numbered]
        return rebuild, (type(obj), attributes)

    try:
        return ship(optimizer, name_of, reduction)
    except Exception as error:
        names = [k for k, v in optimizer.__dict__.items() if k not in APART and not _ships(v, name_of, reduction)]
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot travel to the workers: "
            + (f"its attributes {names} do not pickle" if names else "its class or its groups do not pickle")
            + f" ({type(error).__name__}: {error}). Keep such objects outside the optimizer."
        ) from error


def _ships(value: Any, name_of: Names, reduction: Callable[[Any], Any]) -> bool:
    try:
        ship(value, name_of, reduction)
    except Exception:
        return False
    return True


def build_optimizer(shipment: Shipment, known: Mapping[str, Tensor]) -> Optimizer:
    """The optimizer on the worker, its tensors where the stock `load_state_dict` would put them."""
    optimizer: Optimizer = unship(shipment, known)
    own = {id(p) for p in known.values()}
    first = next((p for g in optimizer.param_groups for p in g["params"]), None)
    group_of = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    for p, state in optimizer.state.items():
        if isinstance(p, Tensor) and isinstance(state, dict):
            group = group_of.get(id(p), {})
            pinned = not (group.get("fused") or group.get("capturable"))
            for key, value in state.items():
                state[key] = value if key == "step" and pinned else _moved(value, p.device, own, 0)
    if first is not None:
        for name, value in optimizer.__dict__.items():
            if name not in APART and is_plain(value):
                optimizer.__dict__[name] = _moved(value, first.device, own, 1)
    return optimizer


def _moved(value: Any, device: torch.device, keep: set[int], min_ndim: int) -> Any:
    """`value` with its tensors of `min_ndim` dimensions and more on `device`; the object itself where nothing moves."""
    if isinstance(value, Tensor):
        return value if id(value) in keep or value.ndim < min_ndim or value.device == device else value.to(device)
    if isinstance(value, dict):
        moved = {k: _moved(v, device, keep, min_ndim) for k, v in value.items()}
        if any(moved[k] is not v for k, v in value.items()):
            value.update(moved)
    elif isinstance(value, list):
        value[:] = [_moved(v, device, keep, min_ndim) for v in value]
    elif type(value) is tuple:
        return tuple(_moved(v, device, keep, min_ndim) for v in value)
    return value


def pack_changes(changes: Changes, name_of: Names) -> bytes:
    """The changes as bytes for `Step.groups`, parameters by name."""
    return pickle.dumps(ship(changes, name_of))


def apply_groups(optimizer: Optimizer, body: bytes, known: Mapping[str, Tensor]) -> None:
    """Set groups and attributes on the worker as the driver's are."""
    changes: Changes = unship(pickle.loads(body), known)
    groups = dict(zip(optimizer.__dict__[GROUP_IDS], optimizer.param_groups, strict=True))
    for change in changes.groups:
        group = groups.setdefault(change.id, {"params": []})
        if change.members is not None:
            group["params"] = list(change.members)
        for key in change.removed:
            group.pop(key, None)
        for key, value in change.values.items():
            group[key] = _beside(group.get(key), value)
    optimizer.param_groups[:] = [groups[number] for number in changes.order]
    optimizer.__dict__[GROUP_IDS] = list(changes.order)
    for name in changes.removed:
        optimizer.__dict__.pop(name, None)
    for name, value in changes.attributes.items():
        optimizer.__dict__[name] = _beside(optimizer.__dict__.get(name), value)


def _beside(old: Any, new: Any) -> Any:
    """`new` with its tensors on the devices of those in `old`."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return new.to(old.device)
    if isinstance(old, dict) and isinstance(new, dict):
        return {k: _beside(old.get(k), v) for k, v in new.items()}
    if type(new) in (list, tuple) and isinstance(old, list | tuple) and len(old) == len(new):
        return type(new)(_beside(o, n) for o, n in zip(old, new, strict=True))
    return new


def ship_state(optimizer: Optimizer, name_of: Names, with_state: bool = True) -> Shipment:
    """What a step may have changed on the worker: state, hyperparameters, plain attributes. A copy of its tensors."""
    numbers = optimizer.__dict__[GROUP_IDS]
    groups = {
        i: {k: v for k, v in g.items() if k != "params" and is_plain(v)}
        for i, g in zip(numbers, optimizer.param_groups, strict=True)
    }
    attributes = {k: v for k, v in optimizer.__dict__.items() if k not in APART and is_plain(v)}
    state = dict(optimizer.state) if with_state else {}
    shared = ship({"state": state, "groups": groups, "attributes": attributes}, name_of)
    return Shipment(shared.body, tuple(storage.copy() for storage in shared.storages))


def read_state(shipment: Shipment, known: Mapping[str, Tensor]) -> dict[str, Any]:
    """What `ship_state` sent: {"state": {parameter: ...}, "groups": {number: {key: value}}, "attributes": {...}}."""
    found: dict[str, Any] = unship(shipment, known)
    return found

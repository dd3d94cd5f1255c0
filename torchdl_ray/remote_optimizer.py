"""One optimizer on the workers of one stream: what was sent there, and what a step has to send.

Runs on the driver. What crosses: a shipment at adoption, the changes of hyperparameters and memberships with a step,
state when it is read.

Values are compared with frozen copies of what was last sent, tensors by their bits, so that a learning rate changed in
place is noticed. A step that was dropped after a failure is noticed by its `Pending`: what it carried is sent again.

Invariant: what is marked as sent is on the workers, or in a command that has not failed.
"""

from __future__ import annotations

import collections
import copy
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .adoption import APART, Changes, GroupChange, is_plain, pack_changes, read_state, ship_optimizer
from .entries import Pending
from .program import Adopt, RandomKey, ReadOptimizer, Step
from .remote_parameter import Parameters, hub_of
from .stream import Stream

_MUTABLE = (list, dict, set, collections.deque)  # identity says nothing of what they hold
BY_VALUE_NUMEL = 4096  # larger tensors among attributes are compared by identity and version


class _Missing:
    """Differs from every value."""


MISSING = _Missing()


@dataclass(frozen=True, slots=True)
class Seen:
    """A large tensor as it was seen."""

    tensor: Tensor
    version: int


def freeze(value: Any, max_numel: float = BY_VALUE_NUMEL) -> Any:
    """A copy of `value` to compare with later (see `same`); tensors of remote parameters stand for themselves."""
    if isinstance(value, Tensor):
        if hub_of(value) is not None:
            return value
        return value.detach().cpu().clone() if value.numel() <= max_numel else Seen(value, value._version)
    if isinstance(value, dict):
        return {k: freeze(v, max_numel) for k, v in value.items()}
    if type(value) in (list, tuple, collections.deque):
        items = [freeze(v, max_numel) for v in value]
        return value if type(value) is tuple and _identical(items, value) else type(value)(items)
    return copy.copy(value) if isinstance(value, set) else value


def same(value: Any, frozen: Any) -> bool:
    """Whether `value` is still what `freeze` made `frozen` of."""
    if type(value) in (float, int, bool, str, type(None)):
        return value is frozen or (type(value) is type(frozen) and bool(value == frozen or value != value))
    if isinstance(frozen, Seen):
        return value is frozen.tensor and value._version == frozen.version
    if isinstance(value, Tensor) or isinstance(frozen, Tensor):
        both = isinstance(value, Tensor) and isinstance(frozen, Tensor)
        return value is frozen or (both and _same_tensor(value, frozen))
    if isinstance(value, dict):
        return (
            isinstance(frozen, dict)
            and value.keys() == frozen.keys()
            and all(same(v, frozen[k]) for k, v in value.items())
        )
    if type(value) in (list, tuple, collections.deque):
        return (
            type(value) is type(frozen)
            and len(value) == len(frozen)
            and all(same(v, f) for v, f in zip(value, frozen, strict=True))
        )
    if value is frozen:
        return not isinstance(value, set) or value == frozen
    return type(value) is type(frozen) and is_plain(value) and bool(value == frozen)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if hub_of(a) is not None or hub_of(b) is not None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach().cpu(), b.detach().cpu()
    if torch.equal(a, b):
        return True
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]  # a NaN equals itself here
    return torch.equal(*bits)


class Membership:
    """Which parameters an optimizer has, and whose they are: looked up again only when that changes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [(g, tuple(g["params"])) for g in optimizer.param_groups]
        hubs = [[hub_of(p) for p in params] for _, params in self._groups]
        rows = zip(self._groups, hubs, strict=True)
        found = [pair for (_, params), row in rows for pair in zip(params, row, strict=True)]
        first = {id(h): (p, h) for p, h in reversed(found) if h is not None}
        self._samples = list(first.values()) + [(p, None) for p, h in found if h is None]
        self.hubs = list({id(h): h for _, h in found if h is not None}.values())
        self.own = [
            [p for p, h in zip(params, row, strict=True) if h is None]
            for (_, params), row in zip(self._groups, hubs, strict=True)
        ]

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether nothing changed: groups, their parameters, and where those live."""
        if len(optimizer.param_groups) != len(self._groups):
            return False
        pairs = zip(optimizer.param_groups, self._groups, strict=True)
        if not all(group is old and _identical(group["params"], params) for group, (old, params) in pairs):
            return False
        return all(hub_of(p) is h for p, h in self._samples)

    def of(self, keys: Mapping[int, str]) -> list[tuple[dict[str, Any], tuple[Tensor, ...]]]:
        """The groups with their parameters among `keys` (by identity), without those that have none."""
        parts = [(group, tuple(p for p in params if id(p) in keys)) for group, params in self._groups]
        return [(group, members) for group, members in parts if members]


@dataclass(slots=True)
class SentGroup:
    """A group as the workers have it. `members` None: unknown."""

    group: dict[str, Any]
    id: int
    values: dict[str, Any]
    members: tuple[Tensor, ...] | None


class RemoteOptimizer:
    """An optimizer's counterpart on the workers of `stream`, over the parameters of `hubs`."""

    def __init__(self, stream: Stream, hubs: Sequence[Parameters]) -> None:
        self.stream, self.hubs = stream, tuple(hubs)
        self.number = stream.new_id()
        self.adopted: Pending | None = None
        self.known = {hub.key(name): p for hub in hubs for name, p in hub.parameters.items()}
        self._keys = {id(p): key for key, p in self.known.items()}
        self._groups: list[SentGroup] = []
        self._order: tuple[int, ...] | None = None
        self._attributes: dict[str, Any] = {}
        self._unconfirmed: collections.deque[tuple[Pending, Changes | None]] = collections.deque()
        self._dropped = False  # whether steps were dropped that the driver's object has counted
        self._counters: set[str] = set()  # what the stock step changes here and there alike
        self._num_groups = 0
        self._split: tuple[Membership, list[tuple[dict[str, Any], tuple[Tensor, ...]]]] | None = None
        weakref.finalize(self, stream.drop_value, self.number).atexit = False

    def name_of(self, tensor: Tensor) -> str | None:
        """The workers' name of a parameter."""
        return self._keys.get(id(tensor))

    # ---- sending

    def adopt(self, optimizer: Optimizer, membership: Membership, state: Mapping[Any, Any]) -> None:
        """Record `Adopt` with the whole optimizer and `state`. Costs no message of its own."""
        sent = []
        for group, members in self._parts(membership):
            self._num_groups += 1
            values = {k: freeze(v) for k, v in group.items() if k != "params"}
            sent.append(SentGroup(group, self._num_groups, values, members))
        shipment = ship_optimizer(optimizer, self.name_of, state, [(s.id, s.group) for s in sent])
        handle = self.stream.group.put(shipment)
        adopted = self.stream.record(Adopt, [(handle,)] * self.stream.group.size, optimizer=self.number)
        self._groups, self._order = sent, tuple(s.id for s in sent)
        self._attributes = {k: freeze(v) for k, v in optimizer.__dict__.items() if k not in APART}
        self._unconfirmed.clear()
        self.adopted = adopted

    def needs_adoption(self, optimizer: Optimizer) -> bool:
        """Whether the workers lack the optimizer, or an attribute that only travels with all of it has changed."""
        if self.adopted is None or self.adopted.error is not None:
            return True
        return any(
            k not in APART and v is not self._attributes.get(k, MISSING) and not is_plain(v)
            for k, v in optimizer.__dict__.items()
        )

    def step(self, optimizer: Optimizer, membership: Membership, seed: int) -> None:
        """Record `Step` with what changed since the last one. Costs no message of its own."""
        self._settle()
        if self._dropped and self._counters:
            self.read(optimizer, "what the optimizer counts", state=False)
        changes, groups = self._changes(optimizer, membership)
        body = b"" if changes is None else pack_changes(changes, self.name_of)
        key = RandomKey(seed, self.stream.version, 0)
        pending = self.stream.record(Step, optimizer=self.number, groups=body, key=key)
        if changes is not None:
            self._groups, self._order = groups, changes.order
            for change in changes.groups:
                sent = next(g for g in groups if g.id == change.id)
                sent.values.update({k: freeze(v) for k, v in change.values.items()})
                for key_gone in change.removed:
                    sent.values.pop(key_gone, None)
                sent.members = sent.members if change.members is None else change.members
            self._attributes.update({k: freeze(v) for k, v in changes.attributes.items()})
            for name in changes.removed:
                self._attributes.pop(name, None)
        self._unconfirmed.append((pending, changes))

    def _parts(self, membership: Membership) -> list[tuple[dict[str, Any], tuple[Tensor, ...]]]:
        if self._split is None or self._split[0] is not membership:
            self._split = (membership, membership.of(self._keys))
        return self._split[1]

    def _changes(self, optimizer: Optimizer, membership: Membership) -> tuple[Changes | None, list[SentGroup]]:
        groups: list[SentGroup] = []
        changed: list[GroupChange] = []
        for group, members in self._parts(membership):
            sent = next((s for s in self._groups if s.group is group), None)
            if sent is None:
                self._num_groups += 1
                sent = SentGroup(group, self._num_groups, {}, None)
            groups.append(sent)
            old = sent.values
            moved_on = [k for k, v in group.items() if v is not old.get(k, MISSING) or type(v) in _MUTABLE]
            values = {k: group[k] for k in moved_on if k != "params" and not same(group[k], old.get(k, MISSING))}
            removed = tuple(k for k in sent.values if k not in group)
            moved = sent.members is not members and (sent.members is None or not _identical(members, sent.members))
            if values or removed or moved:
                changed.append(GroupChange(sent.id, values, removed, members if moved else None))
        present = optimizer.__dict__
        attributes = {
            k: v
            for k, v in present.items()
            if k not in APART
            and (v is not self._attributes.get(k, MISSING) or type(v) in _MUTABLE)
            and not same(v, self._attributes.get(k, MISSING))
        }
        gone = tuple(k for k in self._attributes if k not in present)
        order = tuple(s.id for s in groups)
        if not changed and not attributes and not gone and order == self._order:
            return None, groups
        return Changes(order, tuple(changed), attributes, gone), groups

    def _settle(self) -> None:
        """Forget what dropped steps carried, so that it is sent again."""
        waiting: collections.deque[tuple[Pending, Changes | None]] = collections.deque()
        for pending, changes in self._unconfirmed:
            if pending.error is None and pending.values is None:
                waiting.append((pending, changes))
            self._dropped = self._dropped or pending.error is not None
            if pending.error is not None and changes is not None:
                self._order = None
                for change in changes.groups:
                    for sent in (s for s in self._groups if s.id == change.id):
                        sent.values.update(dict.fromkeys([*change.values, *change.removed], MISSING))
                        sent.members = sent.members if change.members is None else None
                self._attributes.update(dict.fromkeys([*changes.attributes, *changes.removed], MISSING))
        self._unconfirmed = waiting

    # ---- reading

    @property
    def is_there(self) -> bool | None:
        """Whether the workers have adopted it: None while that is not known."""
        if self.adopted is None or self.adopted.error is not None:
            return False
        return True if self.adopted.values is not None else None

    def read(self, optimizer: Optimizer | None, what: str, *, state: bool = True, names: Sequence[str] = ()) -> Any:
        """Bring home what steps changed: sets groups and attributes on the driver that the user left alone since, and
        returns the state. Sends what was recorded, and waits.

        Args:
            optimizer: the driver's object.
            what: for the error message of a wait that ends too late.
            state: whether to bring the tensors of the state.
            names: attributes and keys of groups that are set in any case.
        """
        pending = self.stream.record(ReadOptimizer, optimizer=self.number, state=state)
        home = read_state(pending.wait(what)[0], self.known)
        self._settle()
        if self._dropped:
            names, self._dropped = (*names, *self._counters), False
        for sent in self._groups:
            _take_over(sent.group, home["groups"].get(sent.id, {}), sent.values, names)
        if optimizer is not None:
            _take_over(optimizer.__dict__, home["attributes"], self._attributes, names)
        return home["state"]

    def trust(self, attributes: Mapping[str, Any], groups: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
        """Take note that the workers' step made these changes as well."""
        self._counters.update(attributes, (key for _, key, _ in groups))
        self._attributes.update(attributes)
        for group, key, value in groups:
            for sent in (s for s in self._groups if s.group is group):
                sent.values[key] = value

    def altered(self, attributes: Mapping[str, Any]) -> list[str]:
        """Which of these attributes differ from those that the workers have."""
        return [k for k, v in attributes.items() if not same(v, self._attributes.get(k, MISSING))]


def _identical(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _take_over(target: dict[str, Any], home: Mapping[str, Any], sent: dict[str, Any], names: Sequence[str]) -> None:
    """Set in `target` what the workers changed and the user did not."""
    for key, value in home.items():
        old = sent.get(key, MISSING)
        untouched = key not in target if old is MISSING else key in target and same(target[key], old)
        if key in names or (untouched and not same(value, old)):
            target[key] = value
            sent[key] = freeze(value)


class RemoteState(collections.defaultdict[Any, Any]):
    """`optimizer.state` where the state lives on the workers: comes home when looked at."""

    def __init__(self, fetch: Callable[[], dict[Any, Any]]) -> None:
        super().__init__(dict)
        self._fetch = fetch
        self.away = True
        self._seen: dict[Any, Any] = {}

    def bring_home(self) -> None:
        """Fetch the state unless it is here. Sends what was recorded, and waits."""
        if self.away:
            found = self._fetch()
            self.away = False
            dict.update(self, found)
            self._seen = {k: freeze(v, float("inf")) for k, v in found.items()}

    def send_away(self) -> None:
        """Forget what is here: the workers are about to change it."""
        dict.clear(self)
        self._seen, self.away = {}, True

    def changed(self) -> bool:
        """Whether the user changed the state after it came home."""
        if self.away:
            return False
        return dict.keys(self) != self._seen.keys() or any(not same(v, self._seen[k]) for k, v in dict.items(self))

    def plain(self) -> collections.defaultdict[Any, Any]:
        """The state as stock PyTorch holds it."""
        self.bring_home()
        return collections.defaultdict(dict, dict(dict.items(self)))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return collections.defaultdict, (dict, dict(self.plain()))

    def __deepcopy__(self, memo: dict[int, Any]) -> collections.defaultdict[Any, Any]:
        return copy.deepcopy(self.plain(), memo)

    def __copy__(self) -> Any:
        return self.plain()

    def __or__(self, other: Any) -> Any:
        return self.plain() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.plain()

    def copy(self) -> Any:
        """A plain copy."""
        return self.plain()


def _at_home(name: str) -> Callable[..., Any]:
    stock = getattr(collections.defaultdict, name)

    def method(self: RemoteState, *args: Any, **kwargs: Any) -> Any:
        self.bring_home()
        return stock(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__len__", "__contains__", "__eq__"),
    *("__ne__", "__ior__", "__repr__", "items", "keys", "values", "get", "pop", "popitem"),
    *("clear", "update", "setdefault"),
):
    setattr(RemoteState, _name, _at_home(_name))

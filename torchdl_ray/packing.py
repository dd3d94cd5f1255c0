"""Messages as bytes: programs that repeat are sent as references, with only their data.

Runs on both sides: one `Packer` per generation of workers on the driver, one `Unpacker` on each worker. What crosses:
of a kind of command that was sent before (the forward of a training loop, say) its number and the few fields that
vary; small payloads inside the same bytes, large ones as references to the object store.

The fields of a command that stay the same from step to step are a *phrase*. The message that meets a phrase first
carries it whole; packing that message again, because a rank did not get it, carries it again. A worker gets messages
in order, so it knows the phrases of all earlier ones.

Invariant: unpacking gives commands equal to those that were packed.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from .program import Backward, Command, Forward, Message, Step, ZeroGrad

_VARYING: dict[type[Command], tuple[str, ...]] = {
    Forward: ("id", "site", "call", "key"),
    Backward: ("id", "site", "call", "seeds"),
    Step: ("id", "site", "groups", "key"),
    ZeroGrad: ("id", "site"),
}
MAX_PHRASES = 256  # kept by a worker; older ones are sent anew

Payload = Mapping[int, Sequence[Any]]


_FIXED = {kind: tuple(f.name for f in fields(kind) if f.name not in names) for kind, names in _VARYING.items()}
_READ_FIXED = {kind: operator.attrgetter(*names) for kind, names in _FIXED.items()}
_READ_VARYING = {kind: operator.attrgetter(*names) for kind, names in _VARYING.items()}


class Packer:
    """Turns messages of one generation into bytes, for ranks that get them all in order."""

    def __init__(self) -> None:
        self._generation = -1
        self._phrases: dict[Any, tuple[int, int, Any]] = {}  # by identities: (number, first message, what it holds)
        self._count = 0

    def pack(self, message: Message) -> bytes:
        """The message as bytes."""
        if message.generation != self._generation or len(self._phrases) > MAX_PHRASES:
            self._generation = message.generation
            self._phrases.clear()
        news: list[tuple[int, type[Command], tuple[Any, ...]]] = []
        body: list[Any] = []
        for command in message.commands:
            kind = type(command)
            if kind not in _VARYING:
                body.append(command)
                continue
            values: Any = _READ_FIXED[kind](command)
            values = values if isinstance(values, tuple) else (values,)
            key = (kind, *map(id, values))
            known = self._phrases.get(key)
            if known is None:
                self._count += 1
                known = self._phrases[key] = (self._count, message.number, values)
            if known[1] >= message.number:
                news.append((known[0], kind, values))
            body.append((known[0], *_READ_VARYING[kind](command)))
        oldest = next(iter(self._phrases.values()))[0] if self._phrases else self._count + 1
        whole = (message.generation, message.number, message.resume, oldest, news, body)
        return pickle.dumps(whole, pickle.HIGHEST_PROTOCOL)


class Unpacker:
    """The inverse of `Packer`, on one worker."""

    def __init__(self) -> None:
        self._phrases: dict[int, tuple[type[Command], dict[str, Any]]] = {}

    def unpack(self, body: bytes) -> Message:
        """The message of these bytes; those of earlier messages were unpacked before."""
        generation, number, resume, oldest, news, commands = pickle.loads(body)
        for phrase, kind, values in news:
            self._phrases[phrase] = kind, dict(zip(_FIXED[kind], values, strict=True))
        for phrase in [p for p in self._phrases if p < oldest]:
            del self._phrases[phrase]
        return Message(generation, number, tuple(map(self._command, commands)), resume)

    def _command(self, item: Any) -> Command:
        if not isinstance(item, tuple):
            return item  # type: ignore[no-any-return]
        kind, fixed = self._phrases[item[0]]
        return kind(**fixed, **dict(zip(_VARYING[kind], item[1:], strict=True)))


class Sent:
    """Stands in a packed payload for the large item number `index`, which travels by the object store."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return Sent, (self.index,)


def pack_payload(payload: Payload, is_reference: Callable[[Any], bool]) -> tuple[bytes, list[Any]]:
    """Small items as bytes, and the references among them, which travel as arguments of their own."""
    references: list[Any] = []
    items: dict[int, tuple[Any, ...]] = {}
    for command, handles in payload.items():
        mine = []
        for handle in handles:
            if is_reference(handle):
                mine.append(Sent(len(references)))
                references.append(handle)
            else:
                mine.append(handle)
        items[command] = tuple(mine)
    return (pickle.dumps(items, pickle.HIGHEST_PROTOCOL) if items else b""), references


def unpack_payload(body: bytes, arrived: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
    """The inverse of `pack_payload`; `arrived` are the values of the references."""
    if not body:
        return {}
    items: dict[int, tuple[Any, ...]] = pickle.loads(body)
    if not arrived:
        return items
    return {c: tuple(arrived[x.index] if isinstance(x, Sent) else x for x in mine) for c, mine in items.items()}

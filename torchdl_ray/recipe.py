"""What calls whose inputs look alike have in common, so that it is worked out once.

Runs on the driver; nothing crosses by itself. A training loop makes the same call again and again, with other values of
the same shapes. A `Recipe` keeps what does not depend on values: who gets which rows, the fields of the command, how
its output is read. `look` says whether two calls look alike; inputs in which a container, a class or a gradient of the
driver takes part have no such look, and are worked out anew.

Invariant: equal looks, under one configuration of the module and one layout, give equal commands but for numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import tree
from .layout import Layout, ShardPlan
from .program import Autocast, ShardData, Structure, WireTensor
from .reading import Reading

_BY_VALUE = frozenset((type(None), bool, int, str))


def look(method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call looks like: of tensors everything but the values, of small objects the value; a hashable, or None
    where this is not enough to tell calls apart.
    """
    grad = torch.is_grad_enabled()
    seen: list[Any] = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is Tensor:
            if value.is_nested or (grad and value.requires_grad):
                return None
            seen.append((value.shape, value.dtype, value.device, value.layout))
        elif kind in _BY_VALUE:
            seen.append((kind, value))
        else:
            return None
    return method, len(args), tuple(kwargs), tuple(seen), grad, torch.is_inference_mode_enabled(), autocast()


@dataclass(frozen=True, eq=False)
class Recipe:
    """How calls of one look are made.

    Args:
        configuration, layout: under which it holds.
        shards: who gets which rows.
        fields: the fields of `Forward` that stay the same.
        cut: which of the inputs are cut, by position.
        expected, reading, joinable: what is known of the output.
    """

    configuration: int
    layout: Layout
    shards: tuple[ShardPlan, ...]
    fields: Mapping[str, Any]
    cut: tuple[int, ...]
    expected: Structure
    reading: Reading
    joinable: tuple[bool, ...]

    def holds(self, configuration: int, layout: Layout) -> bool:
        """Whether nothing has changed that calls depend on apart from their inputs."""
        return configuration == self.configuration and layout == self.layout

    def payload(self, values: Sequence[Any], put: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
        """Each rank's rows of the inputs. A tensor that is given twice travels once."""
        dim = self.fields["dim"]
        wires = {id(values[i]): tree.to_wire(values[i]) for i in self.cut}
        found = []
        for shard in self.shards:
            rows = {key: _rows(wire, shard.start, shard.stop, dim) for key, wire in wires.items()}
            arrays = tuple(rows[id(values[i])] for i in self.cut)
            found.append((put(ShardData(shard.index, shard.rows, shard.pieces, arrays)),))
        return found


def _rows(wire: WireTensor, start: int, stop: int, dim: int) -> WireTensor:
    """Rows of a tensor on its way, as a view; a copy where rows do not lie side by side."""
    array = wire.array[(slice(None),) * dim + (slice(start, stop),)]
    if wire.array.flags.c_contiguous and not array.flags.c_contiguous:
        array = array.copy()
    return WireTensor(array, wire.dtype, array.shape)


def autocast() -> Autocast | None:
    """The driver's autocast state; the workers use it for their own kind of device."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            return Autocast(True, dtype, torch.is_autocast_cache_enabled())
    return None

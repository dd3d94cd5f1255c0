"""How a model looks in a terminal and in a notebook, and what its replicas tell.

Runs on the driver; values and text only, nothing crosses.
"""

from __future__ import annotations

import hashlib
import html as escaping
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .errors import ClosedError
from .placement import Member
from .stream import Stream


class Replica:
    """One copy of the model: where it is, and a way to call a function on it.

    Args:
        member: the worker's place.
        device: its device's name.
        run: `run(fn, args, kwargs, ranks)` calls a function on some ranks and returns the results of all.
    """

    def __init__(self, member: Member, device: str, run: Callable[..., list[Any]]) -> None:
        self.rank, self.node, self.pid, self.device = member.rank, member.node_ip, member.pid, device
        self._run = run

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `fn(module, *args, **kwargs)` on this replica; returns its result, tensors on the CPU. Waits."""
        return self._run(fn, args, kwargs, (self.rank,))[self.rank]

    def __repr__(self) -> str:
        return f"Replica(rank={self.rank}, node={self.node!r}, pid={self.pid}, device={self.device!r})"


def digest(hashes: Mapping[str, str]) -> str:
    """One hash of a replica's named hashes."""
    text = "\n".join(f"{name} {value}" for name, value in sorted(hashes.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def differing(found: Sequence[Mapping[str, str]]) -> dict[str, tuple[int, ...]]:
    """The names that are not equal everywhere, with the ranks that differ from the majority, or all without one."""
    odd: dict[str, tuple[int, ...]] = {}
    for name in sorted({n for hashes in found for n in hashes}):
        values = [hashes.get(name) for hashes in found]
        usual = max(set(values), key=values.count)
        has_majority = 2 * values.count(usual) > len(values)
        ranks = tuple(r for r, value in enumerate(values) if value != usual or not has_majority)
        if ranks:
            odd[name] = ranks
    return odd


def by_every_name(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values by parameter or buffer name, also under the further names of tied ones."""
    known = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    names = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {n: values[known[id(t)]] for n, t in names if known[id(t)] in values}


def _state(stream: Stream, alive: bool) -> str:
    try:
        stream.check_open()
    except ClosedError:  # a worker died
        alive = False
    rate = stream.steps_per_s()
    return "closed" if not alive else f"step {stream.version}" + (f", {rate:.1f} steps/s" if rate else "")


def text(name: str, stream: Stream, alive: bool) -> str:
    """The model in one line."""
    group = stream.group
    nodes = len({m.node_id for m in group.members})
    kinds = ", ".join(sorted(set(group.devices)))
    workers, places = _counted(group.size, "worker"), _counted(nodes, "node")
    return f"DataParallel({name}, {workers} on {places}, {kinds}; {_state(stream, alive)})"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def html(name: str, stream: Stream, alive: bool) -> str:
    """The model as a table, one row per worker."""
    group = stream.group
    cells = "".join(
        f"<tr><td>{m.rank}</td><td>{escaping.escape(m.node_ip)}</td><td>{escaping.escape(d)}</td><td>{m.pid}</td></tr>"
        for m, d in zip(group.members, group.devices, strict=True)
    )
    head = "<tr><th>rank</th><th>node</th><th>device</th><th>pid</th></tr>"
    return f"<b>DataParallel({escaping.escape(name)})</b>: {_state(stream, alive)}<table>{head}{cells}</table>"

"""One copy of a model on a worker: its module, gradients, buffers, and how to go back to the last commit.

Runs on the worker; knows torch and the collective, not Ray. What crosses between workers: the gradient buckets and a
tail of a few numbers per reduction, and the buffers that changed since the last commit.

The tail proves that all ranks mean the same reduction before anybody acts on it: it carries every rank's generation,
position and command number, failure flag and row weight, and sums the None flags of gradients and the changed flags of
buffers.

Invariant: after `reduce` all replicas hold identical gradients, None flags and buffers, or all of them raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .buckets import Buckets
from .collective import Collective
from .errors import CollectiveError


class PeerFailed(Exception):
    """Another rank said in the tail of a reduction that it cannot go on; nobody commits."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class Stamp:
    """What all ranks must agree on in a reduction."""

    generation: int
    position: int
    command: int


class Replica:
    """A module on one device with everything that must be equal on all replicas at a commit.

    Args:
        module: the module, on its device.
        rank, size: this worker's place.
    """

    def __init__(self, module: nn.Module, rank: int, size: int) -> None:
        self.module = module
        self.rank, self.size = rank, size
        self.parameters = dict(module.named_parameters())
        self.buckets = Buckets(self.parameters, rank)
        self.modules = dict(module.named_modules())
        self.weight = 0.0  # of the rows that this rank ran in training since the last commit
        self.trained = False
        self._shadow: dict[str, Tensor] = {}
        self.refresh()

    @property
    def device(self) -> torch.device:
        """Where the tail of a reduction is built: the device of the first parameter or buffer."""
        first = next(iter([*self.parameters.values(), *self.buffers.values()]), None)
        return first.device if first is not None else torch.device("cpu")

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name, as they are now (a module may assign new ones)."""
        return dict(self.module.named_buffers())

    def refresh(self) -> None:
        """Take the present buffers and gradients as those of the last commit."""
        self._keep_buffers()
        self.committed()

    def committed(self) -> None:
        """As `refresh`, after a commit that changed no buffer but by the training forwards before it."""
        if self.trained:
            self._keep_buffers()
        self.buckets.committed()
        self.weight, self.trained = 0.0, False

    def _keep_buffers(self) -> None:
        buffers = self.buffers
        for name, buffer in buffers.items():
            old = self._shadow.get(name)
            if old is None or old.shape != buffer.shape or old.dtype != buffer.dtype:
                self._shadow[name] = buffer.detach().clone()
            else:
                old.copy_(buffer)
        for name in self._shadow.keys() - buffers.keys():
            del self._shadow[name]

    def undo(self) -> None:
        """Go back to the last commit: buffers and gradients as they were."""
        buffers = self.buffers
        for name, old in self._shadow.items():
            if name in buffers and buffers[name].shape == old.shape and not torch.equal(buffers[name], old):
                buffers[name].data.copy_(old)  # see `_level`; an expanded constant could not be written to
        self.buckets.undo()
        self.weight, self.trained = 0.0, False

    def note_rows(self, weight: float) -> None:
        """A training forward ran on this rank with this share of its batch."""
        self.weight += weight
        self.trained = True

    # ---- agreement

    def reduce(self, collective: Collective, stamp: Stamp, failed: bool = False) -> None:
        """Sum gradients and level buffers over all ranks.

        Raises:
            PeerFailed: some rank failed before; nothing was changed that `undo` does not restore.
            CollectiveError: the ranks are not at the same command, or the transport failed.
        """
        if collective.size == 1:
            if self.buckets.pending:
                self.buckets.settle(self.buckets.present.values())
            return
        names, flags = list(self.buckets.present), list(self.buckets.present.values())
        changed = self._changed()
        tail = _tail(collective, stamp, failed, self.weight, [*map(float, flags), *map(float, changed.values())])
        tail = tail.to(self.device)
        if self.buckets.pending:
            self.buckets.begin_local()  # a rank that failed before its own backward has sums that peers add to
            self.buckets.finish(collective.all_reduce, tail)
        else:  # the buckets hold sums already, on every rank: only the buffers are to be levelled
            collective.all_reduce([tail]).wait()
        numbers = _check(tail, collective, stamp)
        self.buckets.settle(n > 0 for n in numbers[: len(names)])
        moved = [name for name, n in zip(changed, numbers[len(names) :], strict=True) if n > 0]
        if moved:
            self._level(collective, moved, _weights(tail, collective.size))

    def _changed(self) -> dict[str, bool]:
        """Which buffers differ from the last commit; all ranks have the same names in the same order."""
        buffers = self.buffers
        if not self.trained or not self._shadow:
            return dict.fromkeys(self._shadow, False)
        alike = {n: n in buffers and buffers[n].shape == old.shape for n, old in self._shadow.items()}
        if self.device.type == "cpu":
            return {n: alike[n] and not torch.equal(old, buffers[n]) for n, old in self._shadow.items()}
        # one wait for the device instead of one per buffer
        flags = [(old != buffers[n]).any() if alike[n] else torch.tensor(False) for n, old in self._shadow.items()]
        return dict(zip(self._shadow, torch.stack([f.to(self.device) for f in flags]).tolist(), strict=True))

    def _level(self, collective: Collective, names: Iterable[str], weights: list[float]) -> None:
        """Make changed buffers equal: floats b0 + sum of w_r (b_r - b0), so that equal ones stay as they are to the
        bit; integers and bools their maximum.
        """
        buffers = self.buffers
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name in names:
            by_dtype.setdefault(buffers[name].dtype, []).append(buffers[name])
        for dtype, members in by_dtype.items():
            flat = torch.cat([b.detach().reshape(-1) for b in members])
            parts = [part.view(dtype) for part in collective.all_gather(flat.view(torch.uint8))]
            level = _mean(parts, weights) if dtype.is_floating_point or dtype.is_complex else _maximum(parts)
            offset = 0
            for b in members:
                # `.data`: a graph that waits for its backward (a generator's, while the discriminator steps) holds
                # running statistics that it does not use, and would refuse them after a counted change
                b.data.copy_(level[offset : offset + b.numel()].view(b.shape))
                offset += b.numel()


def _mean(parts: list[Tensor], weights: list[float]) -> Tensor:
    """b0 + sum of w_r (b_r - b0); dtypes of eight bits, which have no arithmetic, by way of float32."""
    dtype = parts[0].dtype
    if dtype.itemsize == 1:
        parts = [part.to(torch.float32) for part in parts]
    first = parts[0]
    level = first.clone()
    for part, weight in zip(parts, weights, strict=True):
        if weight > 0:
            level += torch.where(part == first, torch.zeros_like(first), (part - first) * weight)
    return level.to(dtype)


def _maximum(parts: list[Tensor]) -> Tensor:
    """The larger of each element; by way of int64, because not every integer dtype can be compared."""
    return torch.stack([part.to(torch.int64) for part in parts]).amax(0).to(parts[0].dtype)


def _tail(collective: Collective, stamp: Stamp, failed: bool, weight: float, flags: list[float]) -> Tensor:
    own = [stamp.generation, stamp.position, stamp.command, float(failed), weight]
    slots = torch.zeros(len(own), collective.size, dtype=torch.float64)
    slots[:, collective.rank] = torch.tensor(own, dtype=torch.float64)
    return torch.cat([slots.reshape(-1), torch.tensor(flags, dtype=torch.float64)])


def _check(tail: Tensor, collective: Collective, stamp: Stamp) -> list[float]:
    """Read a summed tail; returns the caller's own numbers."""
    numbers: list[float] = tail.tolist()
    size = collective.size
    failed = tuple(r for r in range(size) if numbers[3 * size + r] > 0)
    if failed:
        raise PeerFailed(failed)
    stamps = [tuple(map(int, numbers[r : 3 * size : size])) for r in range(size)]
    own = (stamp.generation, stamp.position, stamp.command)
    if stamps != [own] * size:
        raise CollectiveError(
            f"the ranks met in different reductions: rank {collective.rank} of {size} is at {own} (generation, "
            f"position, command), and by rank they are {stamps}; all have to be equal"
        )
    return numbers[5 * size :]


def _weights(tail: Tensor, size: int) -> list[float]:
    weights: list[float] = tail[4 * size : 5 * size].tolist()
    total = sum(weights)
    return [w / total if total > 0 else 1.0 / size for w in weights]


def agree(collective: Collective, stamp: Stamp, failed: bool = False) -> None:
    """Make sure that all ranks have come to this command without a failure, before a commit that reduces nothing.

    Raises:
        PeerFailed, CollectiveError: as `Replica.reduce`.
    """
    if collective.size == 1:
        return
    tail = _tail(collective, stamp, failed, 0.0, [])
    collective.all_reduce([tail]).wait()
    _check(tail, collective, stamp)


def named_tensors(replica: Replica, names: Iterable[str]) -> Mapping[str, Tensor]:
    """Parameters and buffers by name."""
    buffers = replica.buffers
    return {n: replica.parameters[n] if n in replica.parameters else buffers[n] for n in names}

"""Collectives among the workers: what they promise, and how a worker joins a group.

Runs on the workers. `join` decides, alike on all ranks, by what the ranks reduce:

* CUDA devices: NCCL; where two ranks share one GPU, which NCCL refuses, Gloo through host memory, and `note` says so.
* CPUs, all ranks on one node: shared memory (`shared_memory.py`).
* CPUs otherwise: Gloo (`process_group.py`). Nodes are not reduced first in themselves: that would be other additions.

In every case the process gets a default torch process group, and the group is known to Ray by the rendezvous' name, so
that `ray.util.collective.allreduce(tensor, name)` reduces through the same transport.

What crosses: two short strings per rank through the driver's store while the group forms; then tensors.

Invariant: on CPUs, sums have the same bits whatever the transport and however tensors are cut into calls; on every
device all ranks get equal bits. A wait ends at its deadline, at a stop, or soon after a peer has died, with a
CollectiveError. After that the group is of no use, and the tensors that were under way must not be used again: they may
still be written to. Join a new group with new tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import ray
import ray.util.collective as ray_collective
import torch
import torch.distributed as dist
from ray.util.collective.backend_registry import register_collective_backend
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from .errors import ArgumentError, CollectiveError
from .ray_group import RAY_BACKEND, RayNamed, TorchGroup
from .rendezvous import Rendezvous, Stop, StopFlag, Store, Watch, host_store, never_stop

__all__ = [
    "RAY_BACKEND",
    "Collective",
    "Handle",
    "Rendezvous",
    "Solo",
    "Stop",
    "StopFlag",
    "Store",
    "TorchGroup",
    "host_store",
    "join",
    "never_stop",
]

OWN_BACKENDS = ("auto", "gloo", "nccl", "shared_memory")


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the operation is complete. Raises CollectiveError (peer lost, deadline, stop)."""

    def done(self) -> bool:
        """Never waits; True if `wait` would return at once."""


class Collective(Protocol):
    """A group of ranks as a worker uses it. All ranks call the same methods, in the same order, with equal shapes."""

    rank: int
    size: int
    note: str
    """What the user should know about the choice of transport; mostly empty."""

    def all_reduce(self, tensors: Sequence[Tensor]) -> Handle:
        """Start to sum each tensor, of any dtypes, in place over the ranks, in rank order."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor in rank order. Blocks."""

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite the tensors with those of rank `source`. Blocks."""

    def barrier(self) -> None:
        """Return when all ranks have come here."""

    def close(self) -> None:
        """Leave the group. Repeated calls do nothing."""


class _Done:
    """The handle of an operation that is complete."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class Solo:
    """The group of one rank: nothing to do, no message, no torch process group."""

    rank = 0
    size = 1
    note = ""

    def all_reduce(self, tensors: Sequence[Tensor]) -> Handle:
        """The sum over one rank is the tensor itself."""
        return _Done()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return a copy of the tensor."""
        return [tensor.detach().clone()]

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Nothing to do."""

    def barrier(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class Member:
    """What `join` returns: the chosen transport, and what has to be left with it."""

    def __init__(self, name: str, transport: Collective, kind: str, note: str, leave: Callable[[], None]) -> None:
        self.name = name
        self.rank = transport.rank
        self.size = transport.size
        self.kind = kind
        self.note = note
        self.all_reduce = transport.all_reduce
        self.all_gather = transport.all_gather
        self.broadcast = transport.broadcast
        self.barrier = transport.barrier
        self._leave: Callable[[], None] | None = leave

    def close(self) -> None:
        """Leave the group, Ray's registry and torch's default group. Repeated calls do nothing."""
        leave, self._leave = self._leave, None
        if leave:
            leave()


def join(
    rendezvous: Rendezvous, rank: int, *, device: torch.device | str = "cpu", stop: Stop = never_stop
) -> Collective:
    """Join the group as `rank` and return it; all ranks have to call it. In a Ray actor the group is Ray's as well.

    Args:
        device: of the gradients, "cpu" or a CUDA device.
        stop: ends this and every later wait of the group when it returns a reason.

    Raises: CollectiveError where a peer does not come in time, the driver stops the group or closes its store, or the
    backend asked for cannot be had on all ranks; ArgumentError for a rank or backend that does not exist.
    """
    device = torch.device(device)
    if not 0 <= rank < rendezvous.size:
        raise ArgumentError(f"rank {rank} does not exist in group {rendezvous.name!r} of {rendezvous.size} ranks")
    if rendezvous.backend not in OWN_BACKENDS:
        return _join_ray_backend(rendezvous, rank, stop)
    if rendezvous.size == 1:
        return _join_alone(rendezvous, device)
    group, leave = _make_group(rendezvous, rank)
    try:
        kind, note = group.connect(rendezvous, device, stop)
    except BaseException:
        leave()
        raise
    return Member(rendezvous.name, group.transport, kind, note, leave)


def _make_group(rendezvous: Rendezvous, rank: int) -> tuple[TorchGroup, Callable[[], None]]:
    name = rendezvous.name
    if not _in_actor():
        group = TorchGroup(rendezvous.size, rank, name)
        return group, group.destroy_group
    with contextlib.suppress(ValueError):  # registered already
        register_collective_backend(RAY_BACKEND, TorchGroup)
    backend: Any = RAY_BACKEND  # Ray's annotation knows only its own two
    ray_collective.init_collective_group(rendezvous.size, rank, backend, name)
    return ray_collective.get_group_handle(name), lambda: ray_collective.destroy_collective_group(name)


def _join_alone(rendezvous: Rendezvous, device: torch.device) -> Collective:
    """A default group of one, for modules that ask for one; NCCL connects only if somebody uses it."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "cpu:gloo"
    if dist.is_initialized():
        raise CollectiveError(
            f"group {rendezvous.name!r} can not be formed: this process has a default torch process group already; "
            "close the older group, or call torch.distributed.destroy_process_group() first"
        )
    timeout = timedelta(seconds=rendezvous.timeout_s)
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    return Member(rendezvous.name, Solo(), "solo", "", dist.destroy_process_group)


def _join_ray_backend(rendezvous: Rendezvous, rank: int, stop: Stop) -> Collective:
    backend = rendezvous.backend
    if not _in_actor():
        raise ArgumentError(
            f"backend {backend!r} is Ray's, which needs a Ray actor; expected elsewhere {', '.join(OWN_BACKENDS)}"
        )
    if not ray_collective.is_backend_available(backend):
        raise ArgumentError(
            f"backend {backend!r} is not available in Ray's registry; expected one of {', '.join(OWN_BACKENDS)}, or "
            "a backend that ray.util.collective.backend_registry knows on every worker"
        )
    watch = Watch(rendezvous.name, rank, rendezvous.timeout_s, stop)
    milliseconds = int(rendezvous.timeout_s * 1000)
    name: Any = backend  # see `_make_group`
    ray_collective.init_collective_group(rendezvous.size, rank, name, rendezvous.name, gloo_timeout=milliseconds)
    transport = RayNamed(rank, rendezvous.size, rendezvous.name, watch)
    return Member(rendezvous.name, transport, backend, "", transport.close)


def _in_actor() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None

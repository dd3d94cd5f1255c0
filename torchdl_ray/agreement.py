"""Which transport a group takes, decided alike on all ranks.

Runs on the workers while a group forms. What crosses: one or two short strings per rank through the driver's store.

Invariant: the decision is a function of the rendezvous and of the exchanged strings alone, so all ranks agree.

* CUDA devices: NCCL; Gloo through host memory where two ranks share one physical GPU, which NCCL refuses.
* CPUs, all ranks on one node: shared memory; Gloo where one of them cannot have it.
* CPUs otherwise: Gloo. Nodes are not reduced first in themselves: that would be another order of additions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from .errors import ArgumentError, CollectiveError
from .rendezvous import Rendezvous, Watch, exchange
from .shared_block import Block, supported


@dataclass(frozen=True, slots=True)
class Choice:
    """The kind ("nccl", "gloo" or "shared_memory"), what the user should know about it, and the block if it has one."""

    kind: str
    note: str = ""
    block: Block | None = None


def agree(store: Store, watch: Watch, rendezvous: Rendezvous, device: torch.device) -> Choice:
    """Choose the transport; all ranks call it and get the same kind.

    Costs one exchange through the store, two for shared memory. Raises: ArgumentError for a backend that does not fit
    the device; CollectiveError where a backend asked for by name cannot be had on all ranks, or a peer does not come.
    """
    wanted = rendezvous.backend
    if device.type == "cuda":
        if wanted == "shared_memory":
            raise ArgumentError(
                "backend 'shared_memory' reduces CPU tensors, got a CUDA device; expected 'nccl' or 'gloo'"
            )
        return _agree_on_nccl(store, watch, rendezvous, device)
    if wanted == "nccl":
        raise ArgumentError("backend 'nccl' reduces CUDA tensors, got the CPU; expected 'gloo' or 'shared_memory'")
    if wanted == "gloo" or (wanted == "auto" and len(set(rendezvous.nodes)) > 1):
        exchange(store, watch, "present", rendezvous.size, "")
        return Choice("gloo")
    return _agree_on_block(store, watch, rendezvous)


def _agree_on_nccl(store: Store, watch: Watch, rendezvous: Rendezvous, device: torch.device) -> Choice:
    identity = json.dumps([rendezvous.nodes[watch.rank], _gpu_identity(device), dist.is_nccl_available()])
    gpus = exchange(store, watch, "gpu", rendezvous.size, identity)
    if rendezvous.backend == "gloo":
        return Choice("gloo")
    reason = ""
    if not all(json.loads(gpu)[2] for gpu in gpus):
        reason = "torch was built without NCCL on some ranks"
    shared = [[r for r, other in enumerate(gpus) if other == gpu] for gpu in dict.fromkeys(gpus) if gpus.count(gpu) > 1]
    if shared:
        reason = f"ranks {shared[0]} share one physical GPU, which NCCL refuses"
    if not reason:
        return Choice("nccl")
    if rendezvous.backend == "nccl":
        raise CollectiveError(f"backend 'nccl' can not be used: {reason}; expected one GPU per rank, or backend='gloo'")
    return Choice("gloo", f"{reason}: gradients go through host memory with Gloo, which is slower")


def _gpu_identity(device: torch.device) -> str:
    """Names the physical GPU on its node; halves of one GPU have the same name, because NCCL refuses these too."""
    properties = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return str(properties.uuid) if None in place else ":".join(str(part) for part in place)


def _agree_on_block(store: Store, watch: Watch, rendezvous: Rendezvous) -> Choice:
    """Rank 0 makes the block, the others attach; one that cannot sends all to Gloo."""
    size = rendezvous.size
    block, reason = None, ""
    if len(set(rendezvous.nodes)) > 1:
        reason = "the ranks are on different nodes"
    elif not supported():
        reason = "shared memory needs Linux on x86_64"
    elif watch.rank == 0:
        block, reason = _try(lambda: Block.create(size))
    address = exchange(store, watch, "block", size, block.address if block else "")[0]
    if not reason and watch.rank > 0:
        block, reason = _try(lambda: Block.attach(address)) if address else (None, "rank 0 has no block")
    reasons = exchange(store, watch, "attached", size, reason)
    refused = [f"rank {r}: {text}" for r, text in enumerate(reasons) if text]
    if not refused and block:
        block.seal()
        return Choice("shared_memory", "", block)
    if block:
        block.release()
    if rendezvous.backend == "shared_memory":
        raise CollectiveError(
            f"backend 'shared_memory' can not be used ({'; '.join(refused)}); expected all ranks on one x86_64 "
            "node with memory to spare, or backend='auto'"
        )
    return Choice("gloo", f"no shared memory ({'; '.join(refused)}): gradients go through Gloo, which is slower")


def _try(make: Callable[[], Block]) -> tuple[Block | None, str]:
    try:
        return make(), ""
    except OSError as error:
        return None, str(error)

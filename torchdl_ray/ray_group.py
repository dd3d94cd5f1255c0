"""Our collectives as Ray knows them, and Ray's stock ones as we use them.

Runs on the workers. `TorchGroup` is registered with Ray collective, so that `ray.util.collective.allreduce` and its
siblings work by group name on the transport that carries the gradients. `RayNamed` is the other way round.

What crosses: see `process_group.py` and `shared_memory.py`; no actor is made, nothing is left in Ray.

Invariant: Ray makes a group by (size, rank, name) under a lock of its own; so making it here waits for nobody, and
`connect` meets the peers afterwards, outside of that lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray.util.collective as ray_collective
import torch
import torch.distributed as dist
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from .agreement import agree
from .errors import CollectiveError
from .process_group import TorchTransport
from .rendezvous import Rendezvous, Stop, Watch
from .shared_memory import SharedMemoryGroup

RAY_BACKEND = "TORCHDL"
"""The name under which `TorchGroup` is registered with Ray collective."""


class TorchGroup(BaseGroup):
    """Our backend as Ray's registry knows it: registered as "TORCHDL", made by name, connected by `join`.

    Every method takes what `ray.util.collective` hands over: tensors, or numpy arrays, in lists of length one. Sums go
    through the group's transport; other operations gather all values and fold them in rank order.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._torch: TorchTransport | None = None
        self._shared: SharedMemoryGroup | None = None

    @classmethod
    def backend(cls) -> str:
        """The name in Ray's registry."""
        return RAY_BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """True: Gloo is in every build of torch that this package supports."""
        return bool(dist.is_available() and dist.is_gloo_available())

    @property
    def transport(self) -> TorchTransport | SharedMemoryGroup:
        """What reduces. Raises CollectiveError before `connect` and after `destroy_group`."""
        transport = self._shared or self._torch
        if transport is None:
            raise CollectiveError(
                f"group {self.group_name!r} of rank {self.rank} is not connected; expected torchdl_ray.collective.join "
                "to have made it, and not to have left it yet"
            )
        return transport

    def connect(self, rendezvous: Rendezvous, device: torch.device, stop: Stop) -> tuple[str, str]:
        """Meet the other ranks and form the group; returns (kind of transport, note). See `join`."""
        watch = Watch(rendezvous.name, self.rank, rendezvous.timeout_s, stop)
        client = rendezvous.connect()
        store = PrefixStore(rendezvous.name, client)
        choice = agree(store, watch, rendezvous, device)
        try:
            self._torch = TorchTransport(
                PrefixStore("torch", store),
                self.rank,
                self.world_size,
                device,
                watch,
                nccl=choice.kind == "nccl",
                own_groups=choice.block is None,
            )
        except BaseException:
            if choice.block:
                choice.block.release()
            raise
        if choice.block:
            self._shared = SharedMemoryGroup(choice.block, self.rank, watch)
        return choice.kind, choice.note

    def destroy_group(self) -> None:
        """Leave the transport and torch's default group."""
        for part in (self._shared, self._torch):
            if part:
                part.close()
        self._shared = self._torch = None

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        """Reduce in place, on all ranks."""
        self._fold(_one(tensor), _operation(allreduce_options))

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        """Reduce in place on the root; the other ranks' tensors stay as they are."""
        target = _one(tensor)
        total = target.clone()
        self._fold(total, _operation(reduce_options))
        if self.rank == getattr(reduce_options, "root_rank", 0):
            target.copy_(total)

    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None) -> None:
        """Fill `tensor_list[0]` with every rank's tensor."""
        for target, value in zip(tensor_list[0], self.transport.all_gather(_one(tensor)), strict=True):
            _one([target]).copy_(value)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        """Overwrite with the root's tensor."""
        self.transport.broadcast([_one(tensor)], getattr(broadcast_options, "root_rank", 0))

    def reducescatter(self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None) -> None:
        """Reduce the list of one tensor per rank and keep the own one."""
        total = torch.stack([_one([each]) for each in tensor_list[0]])
        self._fold(total, _operation(reducescatter_options))
        _one(tensor).copy_(total[self.rank])

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait for all ranks."""
        self.transport.barrier()

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send to one rank."""
        self._point_to_point(dist.isend, _one(tensor).contiguous(), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive from one rank, in place."""
        target = _one(tensor)
        received = target.contiguous()
        self._point_to_point(dist.irecv, received, recv_options.src_rank)
        if received is not target:
            target.copy_(received)

    def _fold(self, target: Tensor, operation: ReduceOp) -> None:
        if operation == ReduceOp.SUM:
            self.transport.all_reduce([target]).wait()
            return
        fold = {ReduceOp.PRODUCT: torch.mul, ReduceOp.MIN: torch.minimum, ReduceOp.MAX: torch.maximum}[operation]
        first, *others = self.transport.all_gather(target)
        for other in others:
            first = fold(first, other)
        target.copy_(first)

    def _point_to_point(self, operation: Any, tensor: Tensor, peer: int) -> None:
        if self._torch is None:
            raise CollectiveError(f"group {self.group_name!r} of rank {self.rank} is not connected")
        self._torch.point_to_point(operation, tensor, peer)


class RayNamed:
    """A stock Ray backend by its name. Its calls block, so a thread makes them, in order, and the waits are ours.

    The order of additions, timeouts and clean-up are the backend's own.
    """

    def __init__(self, rank: int, size: int, name: str, watch: Watch) -> None:
        self.rank = rank
        self.size = size
        self.note = ""
        self._name = name
        self._watch = watch
        self._calls: queue.SimpleQueue[_RayCall | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="torchdl-ray-collective", daemon=True).start()

    def all_reduce(self, tensors: Sequence[Tensor]) -> _RayCall:
        """Start to sum each tensor in place, one call of Ray's for each."""
        plain = [tensor.detach() for tensor in tensors]

        def run() -> None:
            for tensor in plain:
                ray_collective.allreduce(tensor, self._name)

        return self._submit("all_reduce", run)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor in rank order. Blocks."""
        sent = tensor.detach().contiguous()
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._submit("all_gather", lambda: ray_collective.allgather(received, sent, self._name)).wait()
        return received

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite the tensors with those of rank `source`. Blocks."""
        plain = [tensor.detach() for tensor in tensors]

        def run() -> None:
            for tensor in plain:
                ray_collective.broadcast(tensor, source, self._name)

        self._submit("broadcast", run).wait()

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._submit("barrier", lambda: ray_collective.barrier(self._name)).wait()

    def close(self) -> None:
        """End the thread once it has made its calls, and leave Ray's group."""
        self._calls.put(None)
        ray_collective.destroy_collective_group(self._name)

    def _submit(self, what: str, run: Callable[[], None]) -> _RayCall:
        call = _RayCall(self._watch, f"{what} in Ray's backend", run)
        self._calls.put(call)
        return call

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()


class _RayCall:
    def __init__(self, watch: Watch, what: str, call: Callable[[], None]) -> None:
        self._watch = watch
        self._what = what
        self._call = call
        self._ended = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:  # whatever a backend raises is told by `wait`
            self._error = error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        wait = self._watch.begin(self._what)
        while not self._ended.wait(0.02):
            wait.check()
        if self._error is not None:
            raise wait.error(f"{type(self._error).__name__}: {self._error}") from self._error


def _one(tensors: list[Any]) -> Tensor:
    """The one tensor of Ray's list, detached; numpy arrays as tensors on the same memory."""
    (value,) = tensors
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value.detach()


def _operation(options: Any) -> ReduceOp:
    return getattr(options, "reduceOp", ReduceOp.SUM)

"""`WorkerGroup`: the workers as Ray actors; send a program to all, bring replies home.

Runs on the driver, `WorkerActor` on the worker. What crosses: one actor call per message and rank, the shards by Ray's
object store where they are large (one `ray.put` each), inside the call where they are small; one reply each.

Invariant: `receive` never raises for what a worker did; a death arrives as a `Lost`.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from . import placement
from .collective import Rendezvous, StopFlag, host_store, join
from .errors import PlacementError, WorkerLost
from .packing import Packer, Unpacker, pack_payload, unpack_payload
from .placement import Member
from .program import CallResult, Message, Reply, ShardData, WireTensor
from .shipping import Shipment
from .worker import Worker

INLINE_BYTES = 100_000  # Ray passes smaller arguments inside the call


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that died: what stands in the place of its reply."""

    rank: int
    node: str
    pid: int
    reason: str


class Group(Protocol):
    """Where programs go: workers on Ray actors, or (`is_local`) in this process."""

    size: int
    members: tuple[Member, ...]
    devices: tuple[str, ...]
    is_local: bool

    def put(self, data: Any) -> Any:
        """Make data of one rank, or common data, ready to travel; returns a handle for `send`. It is copied now, so
        that its owner may write into its tensors afterwards.
        """

    def send(self, rank: int, message: Message, payload: Mapping[int, Sequence[Any]]) -> None:
        """Start a message on its way; does not wait."""

    def receive(self, timeout_s: float, arrived: list[Reply | Lost]) -> None:
        """Append what has come, waiting up to `timeout_s` for the first; an answer is forgotten here only when it is
        in the list, so that an interrupt loses none. It may come twice.
        """

    def stop(self, reason: str) -> None:
        """Free the workers that wait for a peer."""

    def close(self) -> None:
        """Let the workers go. Idempotent."""


def size_bytes(data: Any) -> int:
    """How many bytes of arrays a piece of payload holds."""
    if isinstance(data, WireTensor):
        return data.array.nbytes
    if isinstance(data, ShardData):
        return sum(a.array.nbytes for a in data.arrays if isinstance(a, WireTensor))
    return data.size_bytes if isinstance(data, Shipment) else 0


class WorkerActor:
    """What a Ray actor runs: a `Worker` on this process's device."""

    def __init__(self, member: Member, size: int, use_gpu: bool) -> None:
        self.device = torch.device("cuda", 0) if use_gpu else torch.device("cpu")
        if use_gpu:
            if not torch.cuda.is_available():
                raise PlacementError(
                    f"worker {member.rank} on node {member.node_ip} was given GPU {member.gpu_ids}, but its torch "
                    f"{torch.__version__} sees none (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}). "
                    "Install a CUDA build of torch there, or pass use_gpu=False to train on its CPUs"
                )
            torch.cuda.set_device(self.device)
        self.worker = Worker(member.rank, size, self.device, member.node_ip)
        self.note = ""
        self._unpacker = Unpacker()

    def join(self, rendezvous: Rendezvous, generation: int) -> tuple[str, str]:
        """Form the group of a generation; returns the device's name and a note on the transport that was chosen."""
        stop = StopFlag(rendezvous.connect(), generation)
        try:
            collective = join(rendezvous, self.worker.state.rank, device=self.device, stop=stop)
        except BaseException:
            stop.close()
            raise
        self.worker.join(collective)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return name, getattr(collective, "note", "") or ""

    def execute(self, message: bytes, payload: bytes, *large: Any) -> Reply | bytes:
        """Execute a packed message; `large` is what of its payload came by the object store."""
        reply = self.worker.execute(self._unpacker.unpack(message), unpack_payload(payload, large))
        if all(isinstance(value, CallResult) for _, value in reply.results):
            return pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)  # Ray takes longer for anything but bytes
        return reply


class WorkerGroup:
    """Workers on Ray actors.

    Args:
        reservation: the devices, without actors yet.
        use_gpu: whether a worker computes on its GPU.
        backend: see `collective.Rendezvous`.
        timeout_s: deadline of starting, joining, and of every collective.
        runtime_env: Ray's, for the workers.
        name: what Ray's tools show.
    """

    is_local = False

    def __init__(
        self,
        reservation: placement.Reservation,
        *,
        use_gpu: bool,
        backend: str,
        timeout_s: float,
        runtime_env: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.size = reservation.resources.num_workers
        self._reservation = reservation
        self._generation = 0
        self._pending: dict[int, tuple[Any, int]] = {}  # by a running number: (reference, rank)
        self._numbers = itertools.count()
        self._unreachable: list[Lost] = []
        self._packer = Packer()
        self._last_packed: tuple[Message, bytes] | None = None
        self._closed = False
        try:
            self._store = host_store(timeout_s)
        except BaseException:
            reservation.release()
            raise
        try:
            self.actors = reservation.create(
                WorkerActor,
                lambda members: [(member, self.size, use_gpu) for member in members],
                runtime_env=runtime_env,
                name=name,
                timeout_s=timeout_s,
            )
            self.members = reservation.members
            unique = f"torchdl-{uuid.uuid4().hex[:12]}-0"
            nodes = tuple(m.node_id for m in self.members)
            rendezvous = Rendezvous(self._store.host, self._store.port, unique, self.size, nodes, backend, timeout_s)
            refs = [placement.call(actor, "join", rendezvous, 0) for actor in self.actors]
            joined = placement.wait(refs, timeout_s, "the workers to form a group", self.members)
        except BaseException:
            self.close()
            raise
        self.devices = tuple(device for device, _ in joined)
        self.notes = tuple(dict.fromkeys(note for _, note in joined if note))

    def put(self, data: Any) -> Any:
        """See `Group`. Large data goes to the object store, once."""
        return placement.share(data) if size_bytes(data) > INLINE_BYTES else frozen(data)

    def send(self, rank: int, message: Message, payload: Mapping[int, Sequence[Any]]) -> None:
        """See `Group`. One actor call."""
        body, large = pack_payload(payload, placement.is_shared)
        try:
            ref = placement.call(self.actors[rank], "execute", self._packed(message), body, *large)
        except Exception as error:  # Ray was shut down, or was started anew since
            member = self.members[rank]
            self._unreachable.append(Lost(rank, member.node_ip, member.pid, f"it cannot be reached any more ({error})"))
            return
        self._pending[next(self._numbers)] = (ref, rank)

    def _packed(self, message: Message) -> bytes:
        """The message as bytes, made once for all ranks."""
        if self._last_packed is None or self._last_packed[0] is not message:
            self._last_packed = message, self._packer.pack(message)
        return self._last_packed[1]

    def receive(self, timeout_s: float, arrived: list[Reply | Lost]) -> None:
        """See `Group`."""
        while self._unreachable:
            arrived.append(self._unreachable[0])
            del self._unreachable[0]
        if arrived or not self._pending:
            return
        outcomes = placement.poll({key: ref for key, (ref, _) in self._pending.items()}, timeout_s)
        for key, outcome in outcomes.items():
            member = self.members[self._pending[key][1]]
            if isinstance(outcome, placement.Failed):
                outcome = Lost(member.rank, member.node_ip, member.pid, _why(outcome.error))
            arrived.append(pickle.loads(outcome) if isinstance(outcome, bytes) else outcome)
            del self._pending[key]

    def stop(self, reason: str) -> None:
        """See `Group`."""
        self._store.stop(self._generation, reason)

    def close(self) -> None:
        """See `Group`."""
        if not self._closed:
            self._closed = True
            self._pending.clear()
            self._reservation.release()
            # a little later, so that no dying worker complains of a lost connection
            later = threading.Timer(2.0, self._store.close)
            later.daemon = True
            later.start()


def _why(error: BaseException) -> str:
    """What became of a worker that did not answer as it should, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, WorkerLost):
        return f"it died: {text.split(' died: ', 1)[-1][:400]}"
    return f"its process failed outside of any command, with {type(error).__name__}: {text[-400:]}"


def _own(data: Any) -> Any:
    """A copy that shares no memory with the caller's tensors."""
    if isinstance(data, WireTensor):
        return WireTensor(data.array.copy(order="K"), data.dtype, data.shape)
    if isinstance(data, ShardData):
        made = {id(a): _own(a) for a in data.arrays}  # the same array twice stays one
        return ShardData(data.index, data.rows, data.pieces, tuple(made[id(a)] for a in data.arrays))
    if isinstance(data, Shipment):
        return Shipment(data.body, tuple(s.copy() for s in data.storages))
    return list(data) if isinstance(data, list) else data


def frozen(data: Any) -> Any:
    """A copy as `_own` makes it, whose arrays nobody can write to: what every reader gets must stay as it was sent."""
    copied = _own(data)
    arrays: list[WireTensor] = []
    if isinstance(copied, WireTensor):
        arrays = [copied]
    elif isinstance(copied, ShardData):
        arrays = [a for a in copied.arrays if isinstance(a, WireTensor)]
    for wire in arrays:
        wire.array.setflags(write=False)
    return copied

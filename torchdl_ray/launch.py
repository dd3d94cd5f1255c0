"""Run a plain torch.distributed function on the cluster, one process per device: torch.multiprocessing's spawn for Ray.

Runs on the driver (`spawn`) and on the workers (`_Rank`). What crosses: the pickled function once to each worker, and
one outcome per rank back.

Notable choices: the ranks get the environment that `torchrun` gives, so that recipes with and without arguments to
`init_process_group` run as they are. All GPUs of a node are visible to its ranks, so `cuda:{LOCAL_RANK}` is each rank's
own. The rendezvous port stays bound, unused, on rank 0's node until rank 0 listens on it, so nobody else gets it.

Invariant: when `spawn` ends, by a result, an error or Ctrl-C, no process of it is left.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from ray import cloudpickle

from .errors import ArgumentError, WaitTimeout, WorkerLost
from .placement import Failed, Member, Reservation, call, poll, reserve, share, start_ray, wait
from .remote_exception import Packed, pack, unpack
from .resources import check_arguments, resolve

# A rank that fails because another one did says so in these words; the other one's reason is waited for a little.
_FAILED_BY_PEER = re.compile(r"gloo|nccl|tcpstore|store->|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)
_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Returned:
    """A rank's return value, pickled."""

    value: bytes


@dataclass(frozen=True, slots=True)
class _Raised:
    """A rank's exception; `by_peer` if it looks like the consequence of another rank's failure."""

    packed: Packed
    by_peer: bool
    time_s: float


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    num_workers: int | None = None,
    *,
    use_gpu: bool | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    placement_timeout_s: float = 300.0,
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in one process per device and return what the ranks return, in rank order.

    Each process finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT in its
    environment, so `fn` may call `torch.distributed.init_process_group()` with or without arguments. A function that
    sets MASTER_ADDR to "localhost" itself works as long as all ranks are on one node; on several, leave that out. Ranks
    of a node follow each other. On GPUs, `cuda:{LOCAL_RANK}` is the rank's own and the current device; NCCL needs a
    whole one per rank. What the ranks print appears on the driver.

    Args:
        fn: the function; anything that cloudpickle can pickle, so functions of a notebook or of the script as well.
        args: its arguments after rank and world size; shipped once.
        num_workers: number of ranks; None: all GPUs of the cluster, or its CPUs where it has none.
        use_gpu: None: if the cluster has GPUs. False hides them from the ranks.
        resources_per_worker: Ray's names and amounts, {"CPU": 4, "GPU": 1} say.
        runtime_env: Ray's, for these processes.
        timeout_s: seconds that `fn` may take; None: no limit.
        placement_timeout_s: seconds to wait for the devices.

    Returns:
        The return values by rank. CUDA tensors among them arrive on the CPU.

    Raises:
        ArgumentError: found before anything is started.
        PlacementTimeout: the devices cannot be had.
        WorkerLost: a process died; names rank, pid and node.
        WaitTimeout: `timeout_s` passed; names the ranks still running.
        Exception: the first failing rank's own, as its own type, with the worker's traceback as its cause. The other
            ranks are killed at once, wherever they are.
    """
    check_arguments(num_workers, use_gpu, resources_per_worker)
    site = _site()
    payload = _payload(fn, args)
    start_ray()
    resources = resolve(num_workers, use_gpu, resources_per_worker, placement_timeout_s)
    reservation = reserve(resources, placement_timeout_s, name="spawn")
    try:
        handles = reservation.create(
            _Rank, lambda members: [(member,) for member in members], runtime_env=runtime_env, name="spawn"
        )
        environments = _environments(reservation)
        shared = share(payload)
        pending = {rank: call(handle, "run", environments[rank], shared, site) for rank, handle in enumerate(handles)}
        return _collect(pending, reservation.members, timeout_s)
    finally:
        reservation.release()


def _payload(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    if not callable(fn):
        raise ArgumentError(f"fn is {fn!r}; expected a function that takes (rank, world_size, *args)")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ArgumentError(f"args is {args!r}; expected a tuple, such as ({args!r},)")
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        payload = _dumps((fn, tuple(args)))
    except Exception as error:
        raise ArgumentError(
            f"{name} and its arguments cannot be pickled: {error}. Create locks, files and generators inside it."
        ) from error
    signature = None
    with contextlib.suppress(ValueError, TypeError):  # some builtins have none
        signature = inspect.signature(fn)
    if signature is not None:
        try:
            signature.bind(0, 1, *args)
        except TypeError as error:
            raise ArgumentError(
                f"{name}{signature} cannot be called with (rank, world_size, *args) and {len(args)} args: {error}"
            ) from error
    return payload


def _environments(reservation: Reservation) -> list[dict[str, str]]:
    """What torchrun would set, by rank."""
    members = reservation.members
    nodes = list(dict.fromkeys(member.node_id for member in members))
    port = wait([call(reservation.handles[0], "hold_port")], 60.0, "a free port on rank 0's node", members)[0]
    environments = []
    for member in members:
        peers = [peer for peer in members if peer.node_id == member.node_id]
        environment = {
            "RANK": str(member.rank),
            "WORLD_SIZE": str(len(members)),
            "LOCAL_RANK": str(peers.index(member)),
            "LOCAL_WORLD_SIZE": str(len(peers)),
            "NODE_RANK": str(nodes.index(member.node_id)),
            "GROUP_RANK": str(nodes.index(member.node_id)),
            "MASTER_ADDR": "127.0.0.1" if len(nodes) == 1 else members[0].node_ip,
            "MASTER_PORT": str(port),
        }
        if not reservation.resources.use_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        elif member.gpu_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(gpu for peer in peers for gpu in peer.gpu_ids))
        environments.append(environment)
    return environments


def _collect(pending: dict[int, Any], members: Sequence[Member], timeout_s: float | None) -> list[Any]:
    """Wait for all ranks; the first failure ends it, after a moment for its cause if it looks like a consequence."""
    limit = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
    returned: dict[int, bytes] = {}
    failures: dict[int, _Raised | Failed] = {}
    while pending:
        now = time.monotonic()
        if now >= limit:
            if failures:
                break
            raise WaitTimeout(f"fn was still running on rank {', '.join(map(str, pending))} after {timeout_s:g} s")
        for rank, outcome in poll(pending, min(limit - now, 3600.0), members).items():
            del pending[rank]
            if isinstance(outcome, _Returned):
                returned[rank] = outcome.value
            else:
                failures[rank] = outcome
        if any(_is_cause(failure) for failure in failures.values()):
            break
        if failures:
            limit = min(limit, time.monotonic() + _GRACE_S)
    if failures:
        raise _first(failures)
    return [cloudpickle.loads(returned[rank]) for rank in range(len(members))]


def _is_cause(failure: _Raised | Failed) -> bool:
    return isinstance(failure, Failed) or not failure.by_peer


def _first(failures: Mapping[int, _Raised | Failed]) -> BaseException:
    """The failure that explains the others: a death, then what is no consequence, then the earliest."""
    for failure in failures.values():
        if isinstance(failure, Failed) and isinstance(failure.error, WorkerLost):
            return failure.error
    for failure in failures.values():
        if isinstance(failure, Failed):
            return failure.error
    raised = [failure for failure in failures.values() if isinstance(failure, _Raised)]
    earliest = min(raised, key=lambda failure: (failure.by_peer, failure.time_s))
    return unpack(*earliest.packed)


def _site() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class _Rank:
    """One rank's process."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.held: socket.socket | None = None

    def hold_port(self) -> int:
        """Find a free port and keep it bound, so that the kernel gives it to nobody.

        torch's store can still listen on it, because both sockets set SO_REUSEADDR and this one never listens.
        """
        self.held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.held.bind(("", 0))
        port: int = self.held.getsockname()[1]
        return port

    def run(self, environment: Mapping[str, str], payload: bytes, site: str) -> _Returned | _Raised:
        os.environ.update(environment)
        rank = self.member.rank
        try:
            self._choose_device(environment)
            fn, args = cloudpickle.loads(payload)
            return _Returned(_dumps(fn(rank, int(environment["WORLD_SIZE"]), *args)))
        except BaseException as error:
            now = time.time()
            packed = pack(error, rank=rank, node=self.member.node_ip, site=site)
            return _Raised(packed, _is_by_peer(error), now)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _choose_device(self, environment: Mapping[str, str]) -> None:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        if not visible or not self.member.gpu_ids:
            return
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(visible.split(",").index(self.member.gpu_ids[0]))


def _is_by_peer(error: BaseException) -> bool:
    """True if a collective raised this, which a healthy peer never makes it do."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and f"{os.sep}torch{os.sep}" in frames[-1].filename
    return inside and bool(_FAILED_BY_PEER.search(str(error)))


class _Pickler(cloudpickle.Pickler):
    """cloudpickle with CUDA tensors moved to the CPU: the other side may have no such device."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.is_cuda:
            return obj.detach().cpu().__reduce_ex__(5)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _dumps(value: Any) -> bytes:
    with BytesIO() as file:
        pickler: Any = _Pickler(file)  # type: ignore[no-untyped-call]
        pickler.dump(value)
        return file.getvalue()

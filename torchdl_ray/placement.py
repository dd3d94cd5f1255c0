"""Reserve devices on the cluster, say why they cannot be had, create the workers on them, and wait for answers.

Runs on the driver; beside group.py the only module that talks to Ray. What crosses: at creation two messages per worker
(where are you; build yourself), and whatever the callers send through `call`.

Notable choices: the devices are reserved as one placement group before any process starts, so a job either has all its
workers or none. Workers start bare and say where they are; only then are ranks given (node by node, device by device)
and the constructors run, so that a constructor may know all of its peers. A constructor that fails therefore fails as a
call does, with the user's own exception.

Invariant: whatever `reserve` or `create` leave by, an exception and Ctrl-C included, either the caller holds a
`Reservation` or nothing is left on the cluster.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray._private import services
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .errors import PlacementError, PlacementTimeout, UnsupportedError, WaitTimeout, WorkerLost
from .remote_exception import Packed, pack, unpack
from .resources import Resources, can_grow, explain, fitting

logger = logging.getLogger("torchdl_ray")

_EXPLAIN_AFTER_S = 4.0
_EXPLAIN_EVERY_S = 60.0
_IMPOSSIBLE_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class Member:
    """Where a worker runs: `gpu_ids` are Ray's ids on its node, empty without a GPU; `cpus` may be a fraction."""

    rank: int
    node_id: str
    node_ip: str
    pid: int
    gpu_ids: tuple[str, ...]
    cpus: float

    def __str__(self) -> str:
        return f"worker {self.rank} (pid {self.pid}, node {self.node_ip})"


@dataclass(frozen=True, slots=True)
class Failed:
    """The outcome of a call that raised, as `poll` reports it."""

    error: BaseException


def start_ray(num_cpus: int | None = None) -> bool:
    """Make sure that this process is a Ray driver; nothing happens if it is one.

    Joins the cluster that `ray.init()` itself would join (RAY_ADDRESS, `ray job submit`, a running `ray start`), and
    otherwise starts a local one (4 to 5 s), without dashboard, which Ray ends with this process.

    Args:
        num_cpus: CPUs of a local cluster; None: those of the machine. Without effect on one that is joined.

    Returns:
        True if this call started a local cluster.

    Raises:
        UnsupportedError: RAY_ADDRESS names a Ray Client server (`ray://`).
    """
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise UnsupportedError(
            f"RAY_ADDRESS is {address!r}, a Ray Client server, which passes no batches through shared memory. "
            "Run the driver inside the cluster instead: `ray job submit`, or a notebook on one of its nodes."
        )
    quiet: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.WARNING}
    try:
        joins = services.canonicalize_bootstrap_address(None) is not None  # type: ignore[arg-type]
        ray.init(**quiet) if joins else ray.init(num_cpus=num_cpus, **quiet)
    except BaseException:
        ray.shutdown()  # half a cluster is none; Ctrl-C comes here as well
        raise
    return not joins


def reserve(resources: Resources, timeout_s: float, strategy: str = "PACK", name: str = "torchdl_ray") -> Reservation:
    """Reserve the devices of all workers at once. One message to Ray's head, then polls it.

    Waits up to `timeout_s` for devices that others hold or an autoscaler brings, and warns after a few seconds what it
    waits for. What the cluster can never hold, as far as it knows itself, is given up after 10 s.

    Args:
        resources: from `resolve`.
        timeout_s: seconds to wait.
        strategy: Ray's placement strategy; "PACK" fills a node before the next.
        name: the start of the name that others see when they ask who holds the devices.

    Raises:
        PlacementTimeout: not to be had in time; says what was asked for, what exists, and who holds it.
    """
    started = time.monotonic()
    unique = f"{name}-{uuid.uuid4().hex[:6]}"
    group = placement_group([resources.bundle()] * resources.num_workers, strategy=strategy, name=unique)
    try:
        _await_group(group, resources, started, timeout_s)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        return Reservation(resources, group, tuple(nodes[index] for index in range(resources.num_workers)))
    except BaseException:
        remove_placement_group(group)
        raise


def _await_group(group: PlacementGroup, resources: Resources, started: float, timeout_s: float) -> None:
    impossible = fitting(resources) < resources.num_workers and not can_grow(resources)
    limit = started + (min(timeout_s, _IMPOSSIBLE_AFTER_S) if impossible else timeout_s)
    explain_at = started + (1.0 if impossible else _EXPLAIN_AFTER_S)
    pause = 0.002
    while True:
        state = placement_group_table(group)["state"]
        if state == "CREATED":
            return
        now = time.monotonic()
        if state == "REMOVED":
            raise PlacementError("the reservation was removed by somebody else while it was waited for; ask again")
        if now >= limit:
            waited = f"devices for {resources.num_workers} workers could not be had within {now - started:.0f} s.\n"
            raise PlacementTimeout(waited + explain(resources, group.id.hex()))
        if now >= explain_at:
            rest = limit - now
            logger.warning("waiting for devices, up to %.0f s more.\n%s", rest, explain(resources, group.id.hex()))
            explain_at = now + _EXPLAIN_EVERY_S
        time.sleep(min(pause, max(limit - now, 0.0)))
        pause = min(pause * 1.5, 0.25)


@dataclass(eq=False)
class Reservation:
    """Devices that this driver holds, and the workers on them once `create` has been called."""

    resources: Resources
    group: PlacementGroup
    bundle_nodes: tuple[str, ...]
    members: tuple[Member, ...] = ()
    handles: list[Any] = field(default_factory=list)
    released: bool = False

    def create(
        self,
        actor_class: type,
        per_rank_args: Sequence[tuple[Any, ...]] | Callable[[tuple[Member, ...]], Sequence[tuple[Any, ...]]],
        *,
        runtime_env: Mapping[str, Any] | None = None,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 300.0,
        site: str = "",
    ) -> list[Any]:
        """Start one worker per device, all in parallel, and run their constructors. Takes about 2 s.

        Ranks follow nodes (the driver's first), then devices. A worker's number of torch threads is its number of CPUs,
        unless OMP_NUM_THREADS is set here or there.

        Args:
            actor_class: a plain class; its methods become the handles' methods.
            per_rank_args: the constructor's arguments by rank, or a function of all members that returns them. Object
                references among them (see `share`) arrive as their values.
            runtime_env: Ray's, for these workers only.
            name: the name that Ray's tools show instead of the class's.
            options: further actor options, `concurrency_groups` say.
            timeout_s: seconds until all have started and built.
            site: the user's line, for the message of an exception.

        Returns:
            Actor handles by rank; `members` says where they are.

        Raises:
            PlacementError: a worker could not start.
            WaitTimeout: they did not start or build in time.
            WorkerLost: one died.
            Exception: what a constructor raised. In each case the workers are killed and the devices free.
        """
        started = time.monotonic()
        try:
            kind: Any = ray.remote(type(name or actor_class.__name__, (_Hosted, actor_class), {}))
            bare = [kind.options(**self._actor_options(b, runtime_env, options)).remote() for b in self._order()]
            self.handles = bare
            self._give_ranks(bare, timeout_s)
            args = per_rank_args(self.members) if callable(per_rank_args) else per_rank_args
            threads = _threads_wanted(runtime_env)
            refs = [
                handle.torchdl_build.remote(member, threads, site, *mine)
                for handle, member, mine in zip(self.handles, self.members, args, strict=True)
            ]
            rest = max(timeout_s - (time.monotonic() - started), 0.1)
            for packed in wait(refs, rest, "the workers' constructors", self.members):
                if packed is not None:
                    raise unpack(*packed)
        except BaseException:
            self.release()
            raise
        return self.handles

    def _actor_options(
        self, bundle: int, runtime_env: Mapping[str, Any] | None, options: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        chosen: dict[str, Any] = {"scheduling_strategy": strategy, "max_restarts": 0, **self.resources.actor_options()}
        if runtime_env:
            chosen["runtime_env"] = dict(runtime_env)
        return {**chosen, **(options or {})}

    def _order(self) -> list[int]:
        """The bundles node by node, the driver's own node first."""
        here = ray.get_runtime_context().get_node_id()
        return sorted(range(len(self.bundle_nodes)), key=lambda b: (self.bundle_nodes[b] != here, self.bundle_nodes[b]))

    def _give_ranks(self, bare: list[Any], timeout_s: float) -> None:
        try:
            places = wait([handle.torchdl_place.remote() for handle in bare], timeout_s, "the workers' start")
        except (ray.exceptions.RayError, WorkerLost) as error:
            raise PlacementError(f"a worker could not start: {_reason(error)}") from error
        nodes = list(dict.fromkeys(place[0] for place in places))
        order = sorted(range(len(bare)), key=lambda i: (nodes.index(places[i][0]), _device_key(places[i][3]), i))
        self.handles = [bare[i] for i in order]
        self.members = tuple(_member(rank, places[i], self.resources.cpus) for rank, i in enumerate(order))

    def release(self) -> None:
        """Kill the workers and give the devices back. Idempotent, never raises, waits for nothing."""
        if self.released:
            return
        self.released = True
        handles, self.handles = self.handles, []
        if not ray.is_initialized():
            return  # Ray was shut down, and with it the job that owned all this
        for handle in handles:
            try:
                ray.kill(handle, no_restart=True)
            except Exception as error:  # dead already, or of a cluster that is gone
                logger.debug("kill: %s", error)
        try:
            remove_placement_group(self.group)
        except Exception as error:
            logger.debug("remove_placement_group: %s", error)


class _Hosted:
    """What placement adds in front of an actor class: start bare, say where, and build when told."""

    def __init__(self) -> None:
        pass

    def torchdl_place(self) -> tuple[str, str, int, tuple[str, ...]]:
        context, util = ray.get_runtime_context(), cast(Any, ray.util)
        gpu_ids = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ()))
        return context.get_node_id(), util.get_node_ip_address(), os.getpid(), gpu_ids

    def torchdl_build(self, member: Member, threads: int | None, site: str, *args: Any) -> Packed | None:
        try:
            _set_threads(threads, member.cpus)
            super().__init__(*args)  # the actor class, which follows in the order of bases
        except BaseException as error:
            return pack(error, rank=member.rank, node=member.node_ip, site=site, called="its constructor")
        return None


def _threads_wanted(runtime_env: Mapping[str, Any] | None) -> int | None:
    """The number of threads that the user's OMP_NUM_THREADS on the driver asks for; None: the worker decides."""
    if "OMP_NUM_THREADS" in ((runtime_env or {}).get("env_vars") or {}):
        return None
    value = os.environ.get("OMP_NUM_THREADS", "")
    # Under `ray job submit` Ray itself sets it to 1 in the driver's environment.
    if not value.isdigit() or (value == "1" and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ):
        return None
    return int(value)


def _set_threads(wanted: int | None, cpus: float) -> None:
    import torch

    # Ray has set OMP_NUM_THREADS to the CPUs, unless a user set it; torch by itself takes no more than it sees cores.
    value = os.environ.get("OMP_NUM_THREADS", str(max(1, int(cpus))))
    if wanted is not None or value.isdigit():
        torch.set_num_threads(wanted or int(value))


def call(handle: Any, method: str, *args: Any) -> Any:
    """Start a method on a worker and return the reference to its answer, for `wait` or `poll`."""
    return getattr(handle, method).remote(*args)


def share(value: Any) -> Any:
    """Put a value into the object store once, for several workers; returns its reference."""
    return ray.put(value)


def is_shared(value: Any) -> bool:
    """Whether a value is a reference from `share`."""
    return isinstance(value, ray.ObjectRef)


def wait(refs: Sequence[Any], timeout_s: float, what: str, members: Sequence[Member] = ()) -> list[Any]:
    """Wait for all answers, in order. The first failure ends the wait and is raised.

    Args:
        refs: from `call`, by rank.
        timeout_s: seconds for all of them together.
        what: completes "waited for ..." in the error.
        members: if given, a death names the rank, the pid and the node.

    Raises:
        WaitTimeout: says who has not answered.
        WorkerLost: a worker died.
    """
    limit = time.monotonic() + timeout_s
    answers: dict[int, Any] = {}
    while len(answers) < len(refs):
        pending = {rank: ref for rank, ref in enumerate(refs) if rank not in answers}
        done = poll(pending, max(limit - time.monotonic(), 0.0), members)
        for outcome in done.values():
            if isinstance(outcome, Failed):
                raise outcome.error
        answers.update(done)
        if not done and time.monotonic() >= limit:
            raise WaitTimeout(
                f"waited {timeout_s:g} s for {what}: {len(answers)} of {len(refs)} workers answered, "
                f"rank {', '.join(map(str, pending))} did not"
            )
    return [answers[rank] for rank in range(len(refs))]


def poll(pending: Mapping[int, Any], timeout_s: float, members: Sequence[Member] = ()) -> dict[int, Any]:
    """Wait until an answer is there, at most `timeout_s`; returns all there are by rank, `Failed` where one raised."""
    ranks = {ref: rank for rank, ref in pending.items()}
    ready, _ = ray.wait(list(ranks), num_returns=1, timeout=timeout_s)
    if ready and len(ranks) > 1:
        ready, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=0)
    outcomes: dict[int, Any] = {}
    for ref in ready:
        rank = ranks[ref]
        try:
            outcomes[rank] = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            who = str(members[rank]) if members else f"worker {rank}"
            why = "its node was taken away (preempted); " if getattr(error, "preempted", False) else ""
            outcomes[rank] = Failed(WorkerLost(f"{who} died: {why}{_reason(error)}"))
        except Exception as error:
            outcomes[rank] = Failed(error)
    return outcomes


def _reason(error: BaseException) -> str:
    """The part of Ray's message that says why, without its lines about class and ids."""
    text = str(error)
    for start in ("The actor is dead because ", "The actor died because "):
        if start in text:
            text = text.split(start, 1)[1]
    text = text.split(" If the process was killed by the kernel OOM killer", 1)[0]
    return " ".join(text.split())


def _member(rank: int, place: tuple[str, str, int, tuple[str, ...]], cpus: float) -> Member:
    node_id, node_ip, pid, gpu_ids = place
    return Member(rank, node_id, node_ip, pid, gpu_ids, cpus)


def _device_key(gpu_ids: tuple[str, ...]) -> tuple[tuple[bool, int, str], ...]:
    return tuple((not gpu.isdigit(), int(gpu) if gpu.isdigit() else 0, gpu) for gpu in gpu_ids)

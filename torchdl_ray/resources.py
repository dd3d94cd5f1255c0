"""What each worker asks of the cluster, what the cluster has, and who holds it.

Runs on the driver, and only reads: Ray's tables of nodes, actors, placement groups and jobs, which its head keeps with
or without a dashboard. What crosses: nothing to the workers; a few messages to Ray's head when asked.

Invariant: an explanation never fails. Where a table cannot be read it says less.
"""

from __future__ import annotations

import math
import numbers
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import state
from ray.core.generated import gcs_pb2

from .errors import ArgumentError, PlacementError

_ray: Any = ray  # most of these functions have no types
_tables: Any = state
_protocol: Any = gcs_pb2
_FIRST_DEVICE_S = 10.0
_NO_RESOURCE = ("", "object_store_memory", "cpu", "gpu", "num_cpus", "num_gpus")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a group of workers needs: so many workers, and per worker CPUs, GPUs and `extra` (custom ones, memory).

    `use_gpu` says where they compute; with False and `gpus` above 0 they hold GPUs and compute on CPUs.
    """

    num_workers: int
    use_gpu: bool
    cpus: float
    gpus: float
    extra: Mapping[str, float] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        """One worker's needs in Ray's names."""
        needs = {"CPU": self.cpus, "GPU": self.gpus, **self.extra}
        return {name: amount for name, amount in needs.items() if amount > 0}

    def actor_options(self) -> dict[str, Any]:
        """The same as options of an actor."""
        custom = {name: amount for name, amount in self.extra.items() if name != "memory"}
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": custom}
        if "memory" in self.extra:
            options["memory"] = self.extra["memory"]
        return options

    def __str__(self) -> str:
        return f"{self.num_workers} worker{'s' if self.num_workers != 1 else ''} of {_amounts(self.bundle())} each"


def check_arguments(num_workers: object, use_gpu: object, resources_per_worker: object) -> None:
    """Raise ArgumentError for what no cluster could give. Needs no Ray."""
    if num_workers is not None and (isinstance(num_workers, bool) or not isinstance(num_workers, numbers.Integral)):
        raise ArgumentError(f"num_workers is {num_workers!r}; expected a whole number, or None for all devices")
    if isinstance(num_workers, numbers.Integral) and num_workers < 1:
        raise ArgumentError(f"num_workers is {num_workers}; expected at least 1, or None for all devices")
    if not (use_gpu is None or isinstance(use_gpu, bool)):
        raise ArgumentError(f"use_gpu is {use_gpu!r}; expected True, False, or None to let the cluster decide")
    if resources_per_worker is None:
        return
    if not isinstance(resources_per_worker, Mapping):
        raise ArgumentError(f'resources_per_worker is {resources_per_worker!r}; expected a dict such as {{"CPU": 2}}')
    for name, amount in resources_per_worker.items():
        if not isinstance(name, str) or name in _NO_RESOURCE:
            expected = '"CPU", "GPU", "memory" or a custom resource'
            raise ArgumentError(f"resources_per_worker names {name!r}; expected {expected}")
        if isinstance(amount, bool) or not isinstance(amount, numbers.Real) or not 0 <= float(amount) < math.inf:
            raise ArgumentError(f"resources_per_worker[{name!r}] is {amount!r}; expected a number of at least 0")
        if name in ("CPU", "GPU") and float(amount) > 1 and float(amount) % 1:
            raise ArgumentError(f"resources_per_worker[{name!r}] is {amount!r}; above 1 Ray gives whole devices only")
    if use_gpu and resources_per_worker.get("GPU") == 0:
        raise ArgumentError('use_gpu=True and resources_per_worker["GPU"] = 0 contradict each other; leave one out')


def resolve(
    num_workers: int | None = None,
    use_gpu: bool | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    timeout_s: float = _FIRST_DEVICE_S,
) -> Resources:
    """Decide what to ask for. Reads the cluster's totals, so Ray must run; free or taken makes no difference here.

    Args:
        num_workers: None takes as many as the nodes can hold: all GPUs, or all CPUs where there are none.
        use_gpu: None means: if the cluster has GPUs.
        resources_per_worker: Ray's names and amounts. 1 GPU and 1 CPU, or 1 CPU, unless named.
        timeout_s: with `num_workers=None`, how long to wait for a first device; 10 s at most.

    Raises:
        ArgumentError: an argument that no cluster could give.
        PlacementError: `num_workers=None`, and the cluster has no such device.
    """
    check_arguments(num_workers, use_gpu, resources_per_worker)
    asked = dict(resources_per_worker or {})
    if use_gpu is None:
        use_gpu = asked.get("GPU") != 0 and _has_gpus()
    gpus = asked.pop("GPU", 1 if use_gpu else 0)
    cpus = asked.pop("CPU", 1)
    needs = Resources(int(num_workers or 1), bool(use_gpu), cpus, gpus, asked)
    if not needs.bundle():
        raise ArgumentError(f"a worker would hold nothing: {dict(resources_per_worker or {})!r}; name at least a CPU")
    if num_workers is not None:
        return needs
    limit = time.monotonic() + min(timeout_s, _FIRST_DEVICE_S)
    while not (count := fitting(needs)):
        if time.monotonic() >= limit:
            raise PlacementError(
                f"num_workers=None takes all devices, but no node has {_amounts(needs.bundle())}. The cluster has "
                f"{_have()}.{_hidden(needs)} Give num_workers to wait for nodes to come, or ask for less per worker."
            )
        time.sleep(0.1)
    return Resources(count, needs.use_gpu, cpus, gpus, asked)


def fitting(resources: Resources) -> int:
    """The number of such workers that the present nodes could hold if nobody else held anything."""
    needs = resources.bundle()
    return sum(
        min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items()) for node in _nodes().values()
    )


def can_grow(resources: Resources) -> bool:
    """True if an autoscaler has told the cluster that it may bring enough nodes for all these workers."""
    try:
        most = _tables.get_max_resources_from_cluster_config()
    except Exception:
        return True  # unknown: waiting longer is the lesser evil
    if most is None:
        return False
    return all(most.get(name, 0) >= amount * resources.num_workers for name, amount in resources.bundle().items())


def explain(resources: Resources, own_group: str = "") -> str:
    """What was asked for, what the cluster has, who holds it, and what to do; several lines.

    Args:
        resources: what was asked for.
        own_group: hex id of the placement group that waits, to be left out.
    """
    try:
        names = list(resources.bundle())
        nodes = _nodes()
        held = list(_holders(names, own_group))
        lines = [f"asked for: {resources}", f"have: {_have(names)} on {_counted(len(nodes), 'node')}"]
        lines += ["held by: " + (held[0] if held else "nobody")] + ["         " + line for line in held[1:]]
        return "\n".join([*lines, "to do: " + _remedy(resources)])
    except Exception as error:
        return f"asked for: {resources}\n(the cluster's tables cannot be read: {type(error).__name__}: {error})"


def _remedy(resources: Resources) -> str:
    most = fitting(resources)
    if most >= resources.num_workers:
        return "close what holds the devices, or allow more time (placement_timeout_s)"
    grow = "; its autoscaler may bring more" if can_grow(resources) else ""
    other = f"num_workers={most}" if most else "less per worker"
    return f"ask for {other}, or add nodes: the present ones hold at most {most} such{grow}.{_hidden(resources)}"


def _hidden(resources: Resources) -> str:
    if resources.gpus and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return " CUDA_VISIBLE_DEVICES is empty here, which hides GPUs from a Ray that this process starts."
    return ""


def _nodes() -> dict[str, dict[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in _ray.nodes() if node["Alive"]}


def _has_gpus() -> bool:
    if any(node.get("GPU", 0) > 0 for node in _nodes().values()):
        return True
    most = _tables.get_max_resources_from_cluster_config()
    return bool(most and most.get("GPU", 0) > 0)


def _have(names: Iterable[str] = ("GPU", "CPU")) -> str:
    total, free = _ray.cluster_resources(), _ray.available_resources()
    return ", ".join(f"{total.get(n, 0):g} {n} ({free.get(n, 0):g} free)" for n in names)


def _holders(names: list[str], own_group: str) -> Iterable[str]:
    """One line for each placement group and each actor outside of one that holds any of the named resources."""
    jobs = {job["JobID"]: job for job in _tables.job_table()}
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _ray.nodes()}
    actors = _alive_actors()
    rest = {name: _ray.cluster_resources().get(name, 0) - _ray.available_resources().get(name, 0) for name in names}
    for group_id, group in _tables.placement_group_table().items():
        if group["state"] != "CREATED" or group_id == own_group:
            continue
        amounts = _sum(group["bundles"].values(), names)
        if not amounts:
            continue
        _subtract(rest, amounts)
        inside = [a for a in actors if a.placement_group_id.hex() == group_id]
        workers = ", ".join(f"{_class_name(a)} pid {a.pid}" for a in inside) or "no actor in it"
        where = ", ".join(sorted({addresses.get(node, node[:8]) for node in group["bundles_to_node_id"].values()}))
        job = _job(jobs, (inside[0].job_id.hex() if inside else group_id[-8:]))
        yield f"placement group {group['name']!r}: {_amounts(amounts)} on {where} ({workers}), {job}"
    for actor in actors:
        amounts = _sum([dict(actor.required_resources)], names)
        if actor.placement_group_id or not amounts:
            continue
        _subtract(rest, amounts)
        label = f"actor {actor.name!r} of class {_class_name(actor)}" if actor.name else f"actor {_class_name(actor)}"
        where = f"pid {actor.pid} on {actor.address.ip_address}"
        yield f"{label}: {_amounts(amounts)}, {where}, {_job(jobs, actor.job_id.hex())}"
    if other := {name: amount for name, amount in rest.items() if amount > 1e-6}:
        yield f"running tasks: {_amounts(other)}"


def _alive_actors() -> list[Any]:
    accessor = _tables._connect_and_get_accessor()
    return [_protocol.ActorTableData.FromString(data) for data in accessor.get_actor_table(None, "ALIVE")]


def _class_name(actor: Any) -> str:
    return str(actor.class_name).rsplit(".", 1)[-1]


def _job(jobs: Mapping[str, Mapping[str, Any]], job_id: str) -> str:
    if job_id == ray.get_runtime_context().get_job_id():
        return f"job {job_id} (this driver)"
    job = jobs.get(job_id)
    if job is None:
        return f"job {job_id}"
    return f"job {job_id} ({job['Entrypoint']}, pid {job['DriverPid']} on {job['DriverIPAddress']})"


def _sum(bundles: Iterable[Mapping[str, float]], names: list[str]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name in names:
            if bundle.get(name, 0) > 0:
                total[name] = total.get(name, 0) + bundle[name]
    return total


def _subtract(rest: dict[str, float], amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        rest[name] -= amount


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")

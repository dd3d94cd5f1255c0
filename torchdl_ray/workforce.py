"""The arguments that choose and create a model's workers.

Runs on the driver. What crosses: see placement.py and group.py.

Invariant: a wrong argument raises before a cluster is started or asked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from ray.util.collective import is_backend_available
from torch import nn

from . import placement
from .errors import ArgumentError
from .group import Group, WorkerGroup
from .local_group import LocalGroup
from .program import AddModel, DropModel
from .resources import check_arguments, resolve
from .shipping import Shipment
from .stream import Stream

logger = logging.getLogger("torchdl_ray")

BACKENDS = ("auto", "nccl", "gloo", "shared_memory", "local")


def check_module(module: Any) -> None:
    """Raise ArgumentError for what cannot be wrapped."""
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"DataParallel wraps an nn.Module, not {type(module).__name__}")
    if hasattr(module, "_parameters_hub"):
        raise ArgumentError("the module is a DataParallel already; wrap the bare module")


def check_workers(workers: Any) -> None:
    """Raise ArgumentError for what has no workers to share."""
    if workers is not None and not hasattr(workers, "_parameters_hub"):
        raise ArgumentError(f"workers is a {type(workers).__name__}; expected another DataParallel")


def check_options(
    dim: Any, reduction: Any, microbatch_size: Any, loss_weight: Any, timeout_s: Any, out_dims: Any, seed: Any
) -> None:
    """Raise ArgumentError for options of a wrong kind or value."""
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        raise ArgumentError(f"dim is {dim!r}; expected an int of at least 0, the dimension of the inputs' rows")
    values = list(reduction.values()) if isinstance(reduction, Mapping) else [reduction]
    if any(v not in ("mean", "sum") for v in values):
        raise ArgumentError(
            f"reduction is {reduction!r}; expected 'mean', 'sum', or a mapping of output names to those"
        )
    whole = isinstance(microbatch_size, int) and not isinstance(microbatch_size, bool)
    if microbatch_size is not None and not (whole and microbatch_size >= 1):
        raise ArgumentError(f"microbatch_size is {microbatch_size!r}; expected None or an int of at least 1")
    if loss_weight is not None and not callable(loss_weight):
        raise ArgumentError(
            f"loss_weight is a {type(loss_weight).__name__}; expected a function of the call's arguments"
        )
    for dims in out_dims.values() if isinstance(out_dims, Mapping) else [out_dims]:
        if dims is not None and (isinstance(dims, bool) or not isinstance(dims, int)):
            raise ArgumentError(f"out_dims is {out_dims!r}; expected an int, or a mapping of output names to ints")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"seed is {seed!r}; expected an int")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ArgumentError(f"timeout_s is {timeout_s!r}; expected a positive number of seconds")


def check_device(device: Any) -> torch.device:
    """The device that outputs come to. Raises ArgumentError for one that this process does not have."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ArgumentError(
            f"output_device is {device!r}, which this process cannot use ({str(error).splitlines()[0]:.100}); expected "
            "'cpu', or a device that is here"
        ) from error
    return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which workers a model asks for; the arguments of `DataParallel` of the same names."""

    num_workers: int | None
    use_gpu: bool | None
    resources_per_worker: Mapping[str, float] | None
    backend: str
    name: str | None
    timeout_s: float
    placement_timeout_s: float
    runtime_env: Mapping[str, Any] | None


def open_stream(wanted: Wanted, shared: Stream | None, sync: bool) -> Stream:
    """A stream to new workers, or the `shared` one of another model, with one user more.

    Raises: ArgumentError, PlacementError; nothing is left behind.
    """
    if shared is None:
        shared = Stream(open_group(wanted), timeout_s=wanted.timeout_s, sync=sync)
    elif (wanted.num_workers, wanted.use_gpu, wanted.resources_per_worker) != (None, None, None):
        raise ArgumentError(
            "workers=... puts the model on another model's workers; leave out num_workers, use_gpu and "
            "resources_per_worker"
        )
    shared.check_open()
    shared.users += 1
    return shared


def add_model(stream: Stream, shipment: Shipment, seed: int, compiled: bool) -> int:
    """Send a module to all workers and wait until they hold it; returns its number there."""
    model = stream.new_id()
    handle = stream.group.put(shipment)
    stream.record(AddModel, [(handle,)] * stream.group.size, model=model, seed=seed, compiled=compiled)
    stream.finish()
    return model


def leave(stream: Stream, model: int | None) -> None:
    """One user less. The last lets the workers go after what was recorded; before that only the model is forgotten.

    Args:
        model: its number on the workers, None where it never came to be.
    """
    stream.users -= 1
    if stream.users > 0:
        if model is not None:
            stream.record(DropModel, model=model)
            stream.flush()
    elif model is None:
        stream.abandon()
    else:
        stream.close()


def open_group(wanted: Wanted) -> Group:
    """Create the workers: a LocalGroup for `num_workers=0` or `backend="local"`, else a WorkerGroup, on a local Ray if
    none runs.

    Raises: ArgumentError, PlacementError; nothing is left behind.
    """
    arguments = wanted.num_workers, wanted.use_gpu, wanted.resources_per_worker
    if not isinstance(wanted.name, str | None):
        raise ArgumentError(f"name is {wanted.name!r}; expected a string")
    if not isinstance(wanted.runtime_env, Mapping | None):
        raise ArgumentError(f"runtime_env is {wanted.runtime_env!r}; expected a dict, as Ray has it")
    is_zero = wanted.num_workers == 0 and not isinstance(wanted.num_workers, bool)
    if is_zero:
        return LocalGroup()
    check_arguments(*arguments)
    if wanted.backend not in BACKENDS and not (wanted.backend.isupper() and is_backend_available(wanted.backend)):
        raise ArgumentError(
            f"backend is {wanted.backend!r}; expected one of {', '.join(BACKENDS)}, or the name of a backend in "
            "Ray's own registry that is available here, in capitals"
        )
    if wanted.backend == "local":
        return LocalGroup(wanted.num_workers or 1)
    placement.start_ray()
    resources = resolve(*arguments)
    name = wanted.name or "torchdl_ray"
    group = WorkerGroup(
        placement.reserve(resources, wanted.placement_timeout_s, name=name),
        use_gpu=resources.use_gpu,
        backend=wanted.backend,
        timeout_s=wanted.timeout_s,
        runtime_env=wanted.runtime_env,
        name=wanted.name,
    )
    for note in group.notes:
        logger.warning("%s", note)
    return group

"""The arguments that choose and create a model's workers.

Runs on the driver. What crosses: see placement.py and group.py.

Invariant: a wrong argument raises before a cluster is started or asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from . import placement
from .errors import ArgumentError
from .group import Group, WorkerGroup
from .local_group import LocalGroup
from .resources import check_arguments, resolve


def check_module(module: Any) -> None:
    """Raise ArgumentError for what cannot be wrapped."""
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"DataParallel wraps an nn.Module, not {type(module).__name__}")
    if hasattr(module, "_parameters_hub"):
        raise ArgumentError("the module is a DataParallel already; wrap the bare module")


def check_options(dim: Any, reduction: Any, microbatch_size: Any, loss_weight: Any, timeout_s: Any) -> None:
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
    if not timeout_s > 0:
        raise ArgumentError(f"timeout_s is {timeout_s!r}; expected a positive number of seconds")


def check_shared(num_workers: Any, use_gpu: Any, resources: Any) -> None:
    """Raise ArgumentError where a model that shares workers asks for devices of its own."""
    if num_workers is not None or use_gpu is not None or resources is not None:
        raise ArgumentError(
            "workers=... puts the model on another model's workers; leave out num_workers, use_gpu and "
            "resources_per_worker"
        )


def open_group(
    num_workers: int | None,
    use_gpu: bool | None,
    resources_per_worker: Mapping[str, float] | None,
    backend: str,
    name: str | None,
    timeout_s: float,
    placement_timeout_s: float,
    runtime_env: Mapping[str, Any] | None,
) -> Group:
    """Create the workers; the arguments are those of `DataParallel`.

    Returns: a LocalGroup for `num_workers=0` or `backend="local"`, else a WorkerGroup, on a local Ray if none runs.
    Raises: ArgumentError, PlacementError; nothing is left behind.
    """
    is_zero = num_workers == 0 and not isinstance(num_workers, bool)
    if backend == "local" or is_zero:
        if not is_zero:
            check_arguments(num_workers, use_gpu, resources_per_worker)
        return LocalGroup(num_workers or 1)
    check_arguments(num_workers, use_gpu, resources_per_worker)
    placement.start_ray()
    resources = resolve(num_workers, use_gpu, resources_per_worker)
    reservation = placement.reserve(resources, placement_timeout_s, name=name or "torchdl_ray")
    return WorkerGroup(
        reservation,
        use_gpu=resources.use_gpu,
        backend=backend,
        timeout_s=timeout_s,
        runtime_env=runtime_env,
        name=name,
    )

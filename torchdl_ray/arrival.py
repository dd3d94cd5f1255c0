"""A module's arrival on a worker: onto its device, initialised if it has no values yet, compiled if it was.

Runs on the worker, once per model. A module from the meta device (built under `torch.device("meta")`) has shapes only;
its values are drawn here, by the modules' own `reset_parameters`, from the model's seed, so that all replicas start
equal and no process ever holds a copy that it does not train.

Invariant: tied parameters stay one parameter, and no value is left undefined without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .calls import seed_generators
from .errors import UnsupportedError


def settle(module: nn.Module, device: torch.device, seed: int, compiled: bool) -> nn.Module:
    """Make a shipped module ready to run on `device`.

    Raises:
        UnsupportedError: a tensor on the meta device whose module has no way to initialise it.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(t.is_meta for t in tensors):
        _initialise(module, device, seed)
    module.to(device)
    if compiled:
        module.compile()
    return module


def _initialise(module: nn.Module, device: torch.device, seed: int) -> None:
    fresh: dict[int, Tensor] = {}
    owners: list[tuple[str, nn.Module]] = []
    for name, part in module.named_modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        mine = [(table, key, t) for table in tables for key, t in table.items() if t is not None and t.is_meta]
        for table, key, tensor in mine:
            if id(tensor) not in fresh:
                fresh[id(tensor)] = _undefined(tensor, device)
            table[key] = fresh[id(tensor)]
        if mine:
            owners.append((name, part))
    seed_generators(seed, device)
    for name, part in reversed(owners):  # parts before the whole, as constructors do it
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if reset is None:
            raise UnsupportedError(
                f"module '{name}' ({type(part).__name__}) came from the meta device and has no reset_parameters(), so "
                "the workers cannot initialise it; give it one, or build it on a real device"
            )
        reset()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().any()):
            raise UnsupportedError(
                f"'{name}' came from the meta device and is still undefined after its module's reset_parameters(); set "
                "it there, or build the module on a real device"
            )


def _undefined(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape that shows whether somebody filled it: NaN, or zeros where there is no NaN."""
    fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    made = torch.full_like(tensor, fill, device=device, requires_grad=False)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

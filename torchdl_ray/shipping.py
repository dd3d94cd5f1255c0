"""Objects that hold tensors, on their way to the workers: modules, optimizers, optimizer state.

Runs on both sides. `ship` pickles an object with every tensor taken out: a tensor that the other side knows by name (a
parameter of the module) travels as its name, any other as its storage, once, however many views share it. What crosses:
one `Shipment`, whose bytes hold no tensor data, so that Ray moves the arrays without copying them.

Invariant: identity is kept. Two references to one tensor, and two tensors on one storage, are so again after `unship`.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ray import cloudpickle
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .errors import ArgumentError

Reduction = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Shipment:
    """A pickled object and the storages of its tensors, as bytes."""

    body: bytes
    storages: tuple[np.ndarray[Any, Any], ...]

    @property
    def size_bytes(self) -> int:
        """How much travels."""
        return len(self.body) + sum(s.nbytes for s in self.storages)


class _Pickler(cloudpickle.CloudPickler):
    def __init__(self, file: io.BytesIO, known: Callable[[Tensor], str | None], reduction: Reduction | None) -> None:
        super().__init__(file)  # type: ignore[no-untyped-call]
        self.known, self.reduction = known, reduction
        self.seen: dict[int, tuple[Tensor, Any]] = {}
        self.storages: dict[tuple[str, int], int] = {}
        self.arrays: list[np.ndarray[Any, Any]] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self.seen:
            self.seen[id(obj)] = (obj, self._describe(obj))
        return self.seen[id(obj)][1]

    def _describe(self, tensor: Tensor) -> Any:
        name = self.known(tensor)
        if name is not None:
            return ("known", name)
        wrap = "parameter" if isinstance(tensor, nn.Parameter) else "buffer" if isinstance(tensor, nn.Buffer) else ""
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach()
            if plain.layout is not torch.strided or plain.is_quantized:
                raise ArgumentError(
                    f"a tensor of layout {plain.layout} and shape {tuple(plain.shape)} cannot travel to the workers: "
                    "make it dense first"
                )
            head = (len(self.seen), wrap, tensor.requires_grad, plain.dtype, tuple(plain.shape))
            if plain.is_meta:
                return ("meta", *head, plain.stride())
            plain = plain.resolve_conj().resolve_neg()
            storage = plain.untyped_storage()
            key = (str(plain.device), storage.data_ptr() or id(storage))
            if key not in self.storages:
                self.storages[key] = len(self.arrays)
                whole = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(storage)
                self.arrays.append(whole.cpu().numpy())
                self.seen[id(storage)] = (plain, None)
        return ("tensor", *head, plain.stride(), plain.storage_offset(), self.storages[key])

    def reducer_override(self, obj: Any) -> Any:
        reduced = self.reduction(obj) if self.reduction is not None else None
        if reduced is None and isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            return copyreg.__newobj__, (type(obj),), obj.__dict__  # type: ignore[attr-defined] # its own way raises
        return super().reducer_override(obj) if reduced is None else reduced  # type: ignore[no-untyped-call]


def ship(
    obj: Any, known: Callable[[Tensor], str | None] = lambda tensor: None, reduction: Reduction | None = None
) -> Shipment:
    """Pickle `obj` for the other side.

    Args:
        obj: anything that cloudpickle takes, also from a notebook cell; tensors inside may be on any device.
        known: the name of a tensor that the other side has already, or None.
        reduction: a hook in the manner of `Pickler.reducer_override`, that returns None for what is pickled as usual.
    Returns:
        the shipment; its arrays share memory with CPU tensors of `obj`.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, known, reduction)
    pickler.dump(obj)  # type: ignore[no-untyped-call]
    return Shipment(file.getvalue(), tuple(pickler.arrays))


class _Unpickler(pickle.Unpickler):
    def __init__(self, shipment: Shipment, known: Mapping[str, Tensor], device: torch.device | None) -> None:
        super().__init__(io.BytesIO(shipment.body))
        self.known, self.device = known, device
        self.sources = shipment.storages
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.made: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        if pid[0] == "known":
            return self.known[pid[1]]
        kind, number, wrap, requires_grad, dtype, shape, stride, *place = pid
        if number not in self.made:
            if kind == "meta":
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                offset, index = place
                tensor = torch.empty(0, dtype=dtype, device=self.device).set_(
                    self._storage(index), offset, shape, stride
                )
            if wrap == "parameter":
                tensor = nn.Parameter(tensor, requires_grad)
            elif wrap == "buffer":
                tensor = nn.Buffer(tensor)
            else:
                tensor.requires_grad_(requires_grad)
            self.made[number] = tensor
        return self.made[number]

    def _storage(self, index: int) -> torch.UntypedStorage:
        if index not in self.storages:
            array = np.array(self.sources[index])  # a copy: what Ray hands out is read-only and shared
            self.storages[index] = torch.from_numpy(array).to(self.device or "cpu").untyped_storage()
        return self.storages[index]


def unship(shipment: Shipment, known: Mapping[str, Tensor] | None = None, device: torch.device | None = None) -> Any:
    """Build the object again, its tensors on `device` (None: the CPU) and the known ones taken from `known`."""
    return _Unpickler(shipment, known or {}, device).load()


class _HomePickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def dumps_on_cpu(value: Any) -> bytes:
    """Pickle `value`, tensors of a device as CPU tensors, however deep they lie: the other side may have no device."""
    file = io.BytesIO()
    pickler: Any = _HomePickler(file)  # type: ignore[no-untyped-call]
    pickler.dump(value)
    return file.getvalue()

"""Tensors as they travel: the part of tree.py that knows memory.

Runs on both sides. What crosses between processes: `WireTensor`s, whose numpy arrays Ray shares without a copy and
hands out read-only.

Invariant: values, dtype, shape and the order of dimensions in memory arrive exactly as they left, for every dtype.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .errors import ArgumentError
from .program import WireTensor

Array = np.ndarray[Any, Any]

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_KNOWS = frozenset(
    {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
    | {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)


def to_wire(tensor: torch.Tensor, *, copy: bool = False) -> WireTensor:
    """Make a tensor ready to travel; shares memory with a contiguous CPU tensor unless `copy`.

    A dense tensor in another order (channels last, transposed) keeps its order, as a view of a contiguous array.

    Raises:
        ArgumentError: the tensor is sparse, quantized, nested, or on the meta device.
    """
    check_sendable(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    order = None if plain.is_contiguous() else _memory_order(plain)
    dense = plain if order is None else plain.permute(order).contiguous()
    if copy and dense.data_ptr() == tensor.data_ptr() and tensor.device.type == "cpu":
        dense = dense.clone()
    if dense.dtype not in _NUMPY_KNOWS:
        dense = dense.view(_AS_INTEGERS[dense.element_size()])
    array = dense.numpy()
    if order is not None:
        array = array.transpose(sorted(range(len(order)), key=order.__getitem__))
    return WireTensor(array, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def from_wire(wire: WireTensor, device: torch.device | str | None = None, *, writable: bool = True) -> torch.Tensor:
    """Rebuild the tensor: values, dtype and shape exactly as they left.

    Args:
        wire: what `to_wire` made; Ray hands its array out read-only.
        device: where the tensor shall be (None: CPU).
        writable: copy a read-only array, so that the tensor may be written; False shares its memory.
    """
    array = wire.array
    target = torch.device(device or "cpu")
    if not array.flags.writeable:
        array = array.copy(order="K") if writable and target.type == "cpu" else np.asarray(_Unlocked(array))
    tensor = torch.from_numpy(array)
    dtype = getattr(torch, wire.dtype)
    return (tensor if tensor.dtype == dtype else tensor.view(dtype)).to(target)


def pack(value: Any, dumps: Callable[[Any], bytes] = pickle.dumps, *, copy: bool = False) -> WireTensor:
    """Make any cut leaf ready to travel: a tensor as `to_wire`, a numeric array as it is, all else pickled.

    Args:
        dumps: pickles lists and other objects (cloudpickle's, for classes of a notebook).
        copy: share no memory with the value, which its owner may overwrite.
    """
    if isinstance(value, torch.Tensor):
        return to_wire(value, copy=copy)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        array = value.copy() if copy else np.ascontiguousarray(value).reshape(value.shape)
        return WireTensor(array, "numpy", value.shape)
    return WireTensor(np.frombuffer(dumps(value), dtype=np.uint8), "object", ())


def unpack(wire: WireTensor, device: torch.device | str | None = None) -> Any:
    """The inverse of `pack`; what it returns may be written. Arrays and objects stay on the CPU."""
    if wire.dtype == "object":
        return pickle.loads(wire.array.data)
    if wire.dtype == "numpy":
        return wire.array if wire.array.flags.writeable else wire.array.copy()
    return from_wire(wire, device)


class _Unlocked:
    """Lets torch look at a read-only array without its warning; nobody may write through it."""

    def __init__(self, array: Array) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def check_sendable(tensor: torch.Tensor) -> None:
    """Raise ArgumentError for a tensor that `to_wire` refuses."""
    kind = _unsendable(tensor)
    if kind is not None:
        raise ArgumentError(
            f"a {kind} tensor (dtype {tensor.dtype}) cannot travel between driver and workers; dense tensors with data "
            "can. Convert it first (to_dense(), dequantize(), to_padded_tensor()), or create it inside the module."
        )


def _unsendable(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return f"sparse ({str(tensor.layout).removeprefix('torch.')})"
    if tensor.is_quantized:
        return "quantized"
    return "meta" if tensor.is_meta else None


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest where that makes the tensor contiguous, else as they are."""
    order = tuple(sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else tuple(range(tensor.ndim))

"""Tensors arrive on the other side exactly as they left."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from torchdl_ray import tree
from torchdl_ray.errors import ArgumentError

from .sample_trees import same

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_every_dtype_arrives_as_it_left(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 60, (size,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    wire = pickle.loads(pickle.dumps(tree.to_wire(tensor), protocol=5))
    wire.array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for writable in (True, False):
            back = tree.from_wire(wire, writable=writable)
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            assert back.contiguous().flatten().view(torch.uint8).tolist() == raw.tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(24.0).reshape(4, 6)[::2, 1::3],
        torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(3.0).expand(4, 3),
        torch.arange(4.0, requires_grad=True) * 2,
        torch.arange(4.0).to(torch.bfloat16).reshape(2, 2).t(),
        torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
        torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag,
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
    ids=["transposed", "strided", "channels last", "expanded", "graph", "bf16", "conj", "neg", "parameter"],
)
def test_views_arrive_with_their_values_and_order(tensor: torch.Tensor) -> None:
    back = tree.from_wire(pickle.loads(pickle.dumps(tree.to_wire(tensor), protocol=5)))
    assert torch.equal(back, tensor)
    assert not back.requires_grad
    assert type(back) is torch.Tensor
    if tensor.t().is_contiguous() if tensor.ndim == 2 else tensor.ndim == 4:
        assert back.stride() == tensor.stride()


def test_memory_is_shared_unless_a_copy_is_asked_for() -> None:
    tensor = torch.zeros(3)
    shared, copied = tree.to_wire(tensor), tree.to_wire(tensor, copy=True)
    tensor.fill_(1)
    assert shared.array.tolist() == [1, 1, 1]
    assert copied.array.tolist() == [0, 0, 0]
    back = tree.from_wire(shared)
    back.fill_(2)
    assert tensor.tolist() == [2, 2, 2]
    shared.array.flags.writeable = False
    tree.from_wire(shared).fill_(3)  # a read-only array is copied, so that a forward may write into its input
    assert tensor.tolist() == [2, 2, 2]
    assert tree.from_wire(shared, writable=False).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["coo", "csr", "meta", "jagged", "nested", "quantized"],
)
def test_what_cannot_travel_is_named(tensor: torch.Tensor, kind: str) -> None:
    with pytest.raises(ArgumentError, match=kind):
        tree.to_wire(tensor)


@pytest.mark.parametrize(
    "value",
    [torch.ones(2, 3), np.arange(6.0).reshape(2, 3).T, np.array(3), np.array(["a", "bc"]), ["a", None], (1, 2)],
    ids=["tensor", "array", "0-dim array", "strings", "list", "tuple"],
)
def test_pack_and_unpack(value: Any) -> None:
    wire = pickle.loads(pickle.dumps(tree.pack(value), protocol=5))
    wire.array.flags.writeable = False
    back = tree.unpack(wire)
    assert same(back, value)
    if isinstance(back, np.ndarray):
        back[...] = back


def test_packed_copies_share_nothing() -> None:
    array, tensor = np.zeros(3), torch.zeros(3)
    packed = [tree.pack(value, copy=copy) for value in (array, tensor) for copy in (False, True)]
    array += 1
    tensor += 1
    assert [float(wire.array[0]) for wire in packed] == [1, 0, 1, 0]

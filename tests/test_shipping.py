"""Objects that hold tensors arrive as they left: values, identity, strides, and what the other side knows by name."""

import pickle

import pytest
import torch
from torch import nn

from torchdl_ray.errors import ArgumentError
from torchdl_ray.shipping import Shipment, ship, unship


def travelled(obj, **known):
    """Through real bytes, with the arrays read-only as Ray hands them out."""
    shipment = ship(obj, **({"known": known["names"]} if "names" in known else {}))
    arrays = tuple(pickle.loads(pickle.dumps(a)) for a in shipment.storages)
    for array in arrays:
        array.setflags(write=False)
    return unship(Shipment(shipment.body, arrays), known.get("tensors"))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(4).to(torch.bfloat16),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(5)[::2],
        torch.empty(2, 3, device="meta"),
    ],
)
def test_a_tensor(tensor):
    found = travelled({"x": tensor})["x"]
    assert (found.dtype, found.shape, found.stride(), found.device) == (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.device,
    )  # fmt: skip
    if not tensor.is_meta:
        assert torch.equal(found, tensor.resolve_conj())
        found.zero_()  # may be written


def test_identity_is_kept():
    a = torch.randn(4)
    x, y, view = travelled((a, a, a[1:3]))
    assert x is y
    view.zero_()
    assert x[1] == x[2] == 0


def test_a_module_with_tied_weights_hooks_and_a_lambda():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    net.shape = lambda x: x * 2
    net.eval()
    found = travelled(net)
    assert found[2].weight is found[0].weight
    assert isinstance(found[0].weight, nn.Parameter)
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in net.parameters()]
    assert not found.training
    assert found.shape(2) == 4
    x = torch.randn(2, 3)
    assert torch.equal(found(x), net(x))
    assert found[0].weight.data_ptr() != net[0].weight.data_ptr()


def test_what_the_other_side_knows_travels_as_its_name():
    weight, other = nn.Parameter(torch.randn(1000)), torch.zeros(3)
    shipment = ship([weight, other], lambda t: "w" if t is weight else None)
    assert shipment.size_bytes < 1000
    mine = nn.Parameter(torch.ones(2))
    found = unship(shipment, {"w": mine})
    assert found[0] is mine
    assert torch.equal(found[1], other)


def test_bytes_hold_no_tensor_data():
    shipment = ship(nn.Linear(1000, 100))
    assert len(shipment.body) < 5000
    assert shipment.size_bytes > 400_000


def test_sparse_is_refused():
    with pytest.raises(ArgumentError, match="sparse"):
        ship(torch.eye(3).to_sparse())

"""What was one object, one storage or one class is so on the other side; all dtypes; modules of every kind."""

from __future__ import annotations

import gc
import pickle
import textwrap
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from torchdl_ray.errors import ArgumentError
from torchdl_ray.shipping import ship, unship


def travel(obj: Any) -> Any:
    """The object after its journey through bytes."""
    return unship(pickle.loads(pickle.dumps(ship(obj))))


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int8, torch.uint16,
    torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_all_dtypes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2, (4 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    found = travel(raw.view(dtype))
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), raw)


def test_tensors_that_overlap_themselves_and_scalars() -> None:
    tensors = [torch.ones(3).expand(2, 3), torch.arange(24.0)[3:20:5], torch.tensor(7.0)]
    for tensor, found in zip(tensors, travel(tensors), strict=True):
        assert torch.equal(found, tensor)
        assert found.stride() == tensor.stride()


def test_each_arrival_has_memory_of_its_own() -> None:
    tensor = torch.zeros(3)
    shipment = ship(tensor)
    first, second = unship(shipment), unship(shipment)
    first += 1
    assert [t.tolist() for t in (tensor, first, second)] == [[0.0] * 3, [1.0] * 3, [0.0] * 3]
    tensor += 2
    assert unship(shipment).tolist() == [2.0] * 3  # until it leaves, a shipment shares memory with what is shipped


def test_objects_that_are_one() -> None:
    tensor, parameter = torch.ones(2), nn.Parameter(torch.ones(2))
    holder: dict[str, Any] = {"a": tensor, "b": [tensor, parameter], "c": parameter, "d": tensor.clone()}
    holder["self"] = holder
    found = travel(holder)
    assert found["self"] is found
    assert found["a"] is found["b"][0]
    assert found["c"] is found["b"][1]
    found["d"].zero_()
    assert found["a"].tolist() == [1.0, 1.0]


def test_storages_are_shared_by_views_and_travel_once() -> None:
    base = torch.zeros(1000)
    shipment = ship([base, base[10:20], base.view(10, 100).t(), base.detach()])
    assert [s.nbytes for s in shipment.storages] == [4000]
    whole, part, turned, again = unship(shipment)
    whole[15] = 5.0
    assert part[5] == turned[15, 0] == again[15] == 5.0


def test_many_empty_tensors_stay_apart() -> None:
    """Their storages have no address."""
    shapes = [(0,), (0, 3), (2, 0)]
    tensors = [torch.empty(shape, dtype=d) for shape in shapes * 20 for d in (torch.float32, torch.int64)]
    found = travel([*tensors, torch.ones(3)])
    assert [(t.shape, t.dtype) for t in found[:-1]] == [(t.shape, t.dtype) for t in tensors]
    assert len({id(t) for t in found}) == len(tensors) + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.own = nn.Buffer(torch.ones(2))
        self.plain = self.frozen.detach()


def test_parameters_and_buffers_of_a_module() -> None:
    net = Net()
    found = travel(net)
    assert found.head.weight is found.embedding.weight
    assert [n for n, _ in found.named_parameters()] == ["frozen", "embedding.weight"]
    assert [p.requires_grad for p in found.parameters()] == [False, True]
    assert all(type(p) is nn.Parameter and p.is_leaf for p in found.parameters())
    assert [n for n, _ in found.named_buffers()] == ["kept", "hidden", "own"]
    assert "hidden" not in found.state_dict()
    assert isinstance(found.own, nn.Buffer)
    with torch.no_grad():
        found.frozen.fill_(9.0)
    assert found.plain.tolist() == [9.0, 9.0]
    assert net.frozen.tolist() == [1.0, 1.0]


def test_plain_tensors_that_require_grad() -> None:
    leaf = torch.ones(2, requires_grad=True)
    for tensor in (leaf, leaf * 2):
        found = travel(tensor)
        assert found.requires_grad
        assert found.is_leaf
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_parametrized_modules(norm: Any) -> None:
    net = norm(nn.Linear(3, 2)).eval()
    found = travel(net)
    x = torch.ones(1, 3)
    assert torch.equal(found(x), net(x))
    assert found.state_dict().keys() == net.state_dict().keys()
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(0.5).add_(1.0)
    assert not torch.equal(found(x), net(x))


def test_modules_from_the_meta_device_have_shapes_only() -> None:
    with torch.device("meta"):
        net = nn.Linear(10_000, 10_000)
    shipment = ship(net)
    assert shipment.storages == ()
    found = unship(shipment)
    assert found.weight.is_meta
    assert isinstance(found.weight, nn.Parameter)
    assert found.weight.shape == (10_000, 10_000)


def test_a_known_tensor_may_be_a_key() -> None:
    here, there = nn.Parameter(torch.ones(1000)), nn.Parameter(torch.zeros(1000))
    shipment = ship({"a": here, here: "state"}, lambda t: "p" if t is here else None)
    assert shipment.storages == ()
    found = unship(shipment, {"p": there})
    assert found["a"] is there
    assert found[there] == "state"


class Odd:
    """Pickled by the hook in another way."""


def test_reductions_of_ones_own() -> None:
    found = unship(ship([Odd(), Odd], reduction=lambda o: (str, ("odd",)) if isinstance(o, Odd) else None))
    assert found == ["odd", Odd]


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_tensors_are_refused() -> None:
    with pytest.raises(ArgumentError, match="cannot travel to the workers"):
        ship([torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)])


def test_classes_and_lambdas_of_a_notebook() -> None:
    """A model that nobody can import, and that is gone where it was made: the other side has never heard of it."""
    cell = """
        FACTOR = 3.0
        def scaled(x):
            return x * FACTOR

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.full((2,), 2.0))
                self.act = lambda x: scaled(x) + 1
            def forward(self, x):
                return self.act(x * self.weight)
    """
    names: dict[str, Any] = {"__name__": "__main__", "nn": nn, "torch": torch}
    exec(textwrap.dedent(cell), names)
    body = pickle.dumps(ship(names["Net"]()))
    gone = weakref.ref(names["Net"])
    names.clear()
    gc.collect()
    assert gone() is None
    assert unship(pickle.loads(body))(torch.ones(2)).tolist() == [7.0, 7.0]

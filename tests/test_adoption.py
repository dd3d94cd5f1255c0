"""How optimizers travel: from one process to another and back, without a model in between."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdl_ray.adoption import (
    Changes,
    GroupChange,
    apply_groups,
    build_optimizer,
    is_plain,
    pack_changes,
    read_state,
    ship_optimizer,
    ship_state,
)
from torchdl_ray.errors import UnsupportedError

from .optimizer_pairs import assert_equal


class Sides:
    """Two parameters here and there, known by the names a and b, and one that only the driver knows."""

    def __init__(self) -> None:
        self.here = {n: nn.Parameter(torch.full((2,), float(i))) for i, n in enumerate("ab")}
        self.there: dict[str, Tensor] = {n: nn.Parameter(p.detach().clone()) for n, p in self.here.items()}
        self.own = nn.Parameter(torch.zeros(3))

    def name(self, tensor: Tensor) -> str | None:
        return next((n for n, p in self.here.items() if p is tensor), None)

    def name_there(self, tensor: Tensor) -> str | None:
        return next((n for n, p in self.there.items() if p is tensor), None)

    def send(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        groups = [(10 + i, g) for i, g in enumerate(optimizer.param_groups)]
        shipment = ship_optimizer(optimizer, self.name, optimizer.state, groups)
        return build_optimizer(pickle.loads(pickle.dumps(shipment)), self.there)


@pytest.fixture
def sides() -> Sides:
    return Sides()


def adam(sides: Sides, *more: Any) -> torch.optim.Adam:
    return torch.optim.Adam([{"params": [sides.here["a"], *more]}, {"params": [sides.here["b"]], "lr": 0.5}], lr=0.1)


def test_class_groups_attributes_and_state_arrive(sides: Sides) -> None:
    optimizer = adam(sides, sides.own)
    for p in (*sides.here.values(), sides.own):
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.mark = [1, torch.ones(2), sides.here["b"]]  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(lambda o, a, k: None)
    arrived = sides.send(optimizer)
    assert type(arrived) is torch.optim.Adam
    assert [[sides.name_there(p) for p in g["params"]] for g in arrived.param_groups] == [["a"], ["b"]]
    assert [g["lr"] for g in arrived.param_groups] == [0.1, 0.5]
    assert_equal(dict(arrived.state[sides.there["a"]]), dict(optimizer.state[sides.here["a"]]))
    assert len(arrived.state) == 2
    assert arrived.mark[2] is sides.there["b"]  # type: ignore[attr-defined]
    assert not arrived._optimizer_step_pre_hooks


def test_a_forwarded_optimizer_shares_no_memory(sides: Sides) -> None:
    optimizer = adam(sides)
    for p in sides.here.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    arrived = sides.send(optimizer)
    for q in sides.there.values():
        q.grad = torch.ones_like(q)
    arrived.step()
    assert float(optimizer.state[sides.here["a"]]["step"]) == 1
    assert float(arrived.state[sides.there["a"]]["step"]) == 2


def test_changes_are_absolute_and_may_be_applied_twice(sides: Sides) -> None:
    optimizer = adam(sides)
    arrived = sides.send(optimizer)
    groups = arrived.param_groups
    changes = Changes(
        order=(11, 12, 10),
        groups=(
            GroupChange(10, {"lr": torch.tensor(0.25)}, ("eps",)),
            GroupChange(12, {"lr": 1.0}, members=(sides.here["a"],)),
            GroupChange(11, {}, members=()),
        ),
        attributes={"mark": (1, 2)},
        removed=("defaults",),
    )
    for _ in range(2):
        apply_groups(arrived, pack_changes(changes, sides.name), sides.there)
        assert arrived.param_groups is groups
        assert [len(g["params"]) for g in groups] == [0, 1, 1]
        assert groups[1]["params"][0] is sides.there["a"]
        assert groups[2]["lr"] == 0.25
        assert "eps" not in groups[2]
        assert arrived.mark == (1, 2)  # type: ignore[attr-defined]
        assert not hasattr(arrived, "defaults")


def test_state_comes_home_as_a_copy(sides: Sides) -> None:
    arrived = sides.send(adam(sides))
    for q in sides.there.values():
        q.grad = torch.ones_like(q)
    arrived.step()
    arrived.state["total"] = 3  # type: ignore[index]
    arrived.note = "x"  # type: ignore[attr-defined]
    arrived.function = print  # type: ignore[attr-defined]
    shipment = ship_state(arrived, sides.name_there)
    arrived.step()
    home = read_state(shipment, sides.here)
    assert float(home["state"][sides.here["a"]]["step"]) == 1
    assert home["state"]["total"] == 3
    assert home["groups"][11]["lr"] == 0.5
    assert home["attributes"]["note"] == "x"
    assert "function" not in home["attributes"]
    assert read_state(ship_state(arrived, sides.name_there, with_state=False), sides.here)["state"] == {}


def test_a_worker_ships_its_own_under_the_same_numbers(sides: Sides) -> None:
    arrived = sides.send(adam(sides))
    again = build_optimizer(ship_optimizer(arrived, sides.name_there), sides.there)
    apply_groups(again, pack_changes(Changes((11, 10)), sides.name_there), sides.there)
    assert [g["lr"] for g in again.param_groups] == [0.5, 0.1]


def test_what_does_not_pickle_is_named(sides: Sides) -> None:
    optimizer = adam(sides)
    optimizer.stream = (i for i in range(2))  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"Adam cannot travel.*'stream'"):
        sides.send(optimizer)


@pytest.mark.parametrize("value", [None, 1, 1.5, "x", b"x", torch.ones(1), [1, (2, {"a": torch.ones(1)})], {1, 2}])
def test_plain_values(value: Any) -> None:
    assert is_plain(value)


@pytest.mark.parametrize("value", [print, object(), [object()], {"a": print}])
def test_other_values(value: Any) -> None:
    assert not is_plain(value)

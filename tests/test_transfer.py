"""A whole replica's state from one rank to the others: afterwards the next steps are equal to the bit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from torchdl_ray.adoption import GROUP_IDS
from torchdl_ray.calls import Calls
from torchdl_ray.collective import Solo
from torchdl_ray.interpreter import State
from torchdl_ray.local_group import LocalCollective, _Meeting
from torchdl_ray.replica import Replica
from torchdl_ray.transfer import copy_state

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two heads, of which one gets no gradient, a frozen parameter, and a constant that cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("mask", torch.ones(3).expand(2, 3))


def build(rank: int, size: int, collective: Any) -> State:
    """A rank's state after two steps on data of its own."""
    torch.manual_seed(rank)
    state = State(rank, size, CPU, collective, Calls(CPU))
    replica = Replica(Net(), rank, size)
    state.replicas[5] = replica
    net: Any = replica.module
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1 + rank)
    optimizer.__dict__[GROUP_IDS] = [0]
    state.optimizers[7] = optimizer
    for _ in range(2 + rank):
        replica.buckets.zero(list(replica.parameters), to_none=True)
        replica.buckets.begin_local()
        net.used(net.body(torch.randn(4, 3))).sum().backward()
        replica.buckets.settle(replica.buckets.present.values())
        optimizer.step()
    if rank == 1:
        net.body.eval()
        replica.buckets.write("frozen", torch.ones(2))
    replica.refresh()
    state.values[9] = torch.full((2,), float(rank), dtype=torch.bfloat16)
    if rank == 0:
        state.optimizers[8] = torch.optim.SGD(net.parameters())
        state.optimizers[8].__dict__[GROUP_IDS] = [3]
        state.values[1] = torch.ones(1)
    return state


def everything(state: State) -> dict[str, Any]:
    replica = state.replicas[5]
    found: dict[str, Any] = {n: t.detach().clone() for n, t in replica.module.state_dict().items()}
    for name, p in replica.parameters.items():
        found[f"{name}.grad"] = None if p.grad is None else p.grad.clone()
        for number, optimizer in state.optimizers.items():
            for key, value in optimizer.state.get(p, {}).items():
                found[f"{number}.{name}.{key}"] = value.clone()
    for number, optimizer in state.optimizers.items():
        found[f"{number}.lr"] = optimizer.param_groups[0]["lr"]
    found |= {f"value {n}": v for n, v in state.values.items()}
    return found | {f"mode {n}": m.training for n, m in replica.modules.items()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name] is not None, name
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def copied(states: list[State], meeting: _Meeting, source: int) -> list[tuple[int, int]]:
    found: list[Any] = [None] * len(states)

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                found[rank] = copy_state(states[rank], source, (10 + rank, 20 + rank))
            except BaseException as error:
                found[rank] = error
                meeting.stopped = repr(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


@pytest.mark.parametrize("source", [0, 1, 2])
def test_all_ranks_hold_what_the_source_held(source: int) -> None:
    meeting = _Meeting(3)
    states = [build(r, 3, LocalCollective(meeting, r)) for r in range(3)]
    expected = everything(states[source])
    objects = [{n: id(p) for n, p in s.replicas[5].parameters.items()} for s in states]
    assert copied(states, meeting, source) == [(10 + source, 20 + source)] * 3
    for state, ids in zip(states, objects, strict=True):
        replica = state.replicas[5]
        assert_equal(everything(state), expected)
        assert {n: id(p) for n, p in replica.parameters.items()} == ids
        assert (replica.parameters["used.weight"].grad is None) == (expected["used.weight.grad"] is None)
        assert replica.buckets.grad("unused.weight") is None
        group = state.optimizers[7].param_groups[0]["params"]
        assert {id(p) for p in group} == {id(p) for n, p in replica.parameters.items() if n != "frozen"}
        for name in replica.parameters:
            assert replica.parameters[name].grad is replica.buckets.grad(name)
        assert not replica.buckets.pending
        replica.undo()  # the copy is a commit: going back to it changes nothing
        assert_equal(everything(state), expected)


def test_what_was_copied_shares_no_memory() -> None:
    meeting = _Meeting(2)
    states = [build(r, 2, LocalCollective(meeting, r)) for r in range(2)]
    copied(states, meeting, 0)
    before = everything(states[0])
    states[1].optimizers[7].step()
    states[1].values[9].zero_().add_(5)
    assert_equal(everything(states[0]), before)
    states[0].optimizers[7].step()
    assert torch.equal(states[0].replicas[5].parameters["used.weight"], states[1].replicas[5].parameters["used.weight"])


def test_one_rank_has_nothing_to_copy() -> None:
    assert copy_state(State(0, 1, CPU, Solo(), Calls(CPU)), 0, (3, 4)) == (3, 4)

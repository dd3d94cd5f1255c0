"""A whole replica's state, from one rank to all others.

Runs on the worker, when a failure left replicas different: an optimizer that raised half way on one rank, say. What
crosses: one pickle with the tensors beside it, by broadcast; it is received beside the live state and swapped in whole.

Invariant: after `copy_state` all ranks hold the source's parameters, buffers, modes, gradients, optimizers, values,
position and version.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from . import adoption
from .collective import Collective
from .interpreter import State
from .replica import Replica
from .shipping import Shipment, ship, unship


def copy_state(state: State, source: int, counts: tuple[int, int]) -> tuple[int, int]:
    """Take over rank `source`'s state; returns its (position, version).

    Args:
        state: this rank's state; changed in place unless this is the source.
        counts: this rank's (position, version).
    """
    if state.collective.size == 1:
        return counts
    body = pickle.dumps(_collect(state, counts)) if state.rank == source else b""
    received = pickle.loads(_broadcast(state.collective, body, source, state.device))
    if state.rank != source:
        _take(state, received)
    found: tuple[int, int] = received["counts"]
    return found


def _broadcast(collective: Collective, body: bytes, source: int, device: torch.device) -> bytes:
    length = torch.tensor([len(body)], dtype=torch.int64, device=device)
    collective.broadcast([length], source)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    if body:
        data.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    collective.broadcast([data], source)
    return data.cpu().numpy().tobytes()


def _collect(state: State, counts: tuple[int, int]) -> dict[str, Any]:
    name_of = state.key_of()
    return {
        "counts": counts,
        "replicas": {number: ship(_tensors(replica)) for number, replica in state.replicas.items()},
        "modes": {n: {k: m.training for k, m in r.modules.items()} for n, r in state.replicas.items()},
        "optimizers": {
            number: adoption.ship_optimizer(optimizer, name_of) for number, optimizer in state.optimizers.items()
        },
        "values": ship(state.values),
    }


def _tensors(replica: Replica) -> dict[str, dict[str, Tensor]]:
    grads = {name: replica.buckets.grad(name) for name in replica.parameters}
    return {
        "state": {n: t.detach() for n, t in {**replica.parameters, **replica.buffers}.items()},
        "grads": {name: grad for name, grad in grads.items() if grad is not None},
    }


def _take(state: State, received: dict[str, Any]) -> None:
    for number, shipment in received["replicas"].items():
        replica = state.replicas[number]
        tensors = unship(shipment)
        own = {**replica.parameters, **replica.buffers}
        with torch.no_grad():
            for name, value in tensors["state"].items():
                if not torch.equal(own[name], value.to(state.device)):  # an expanded constant cannot be written to
                    own[name].copy_(value)
        replica.buckets.zero(list(replica.parameters), to_none=True)
        for name, grad in tensors["grads"].items():
            replica.buckets.write(name, grad.to(state.device))
        for name, training in received["modes"][number].items():
            replica.modules[name].training = training
        replica.refresh()
    known = state.known()
    shipments: dict[int, Shipment] = received["optimizers"]
    state.optimizers = {number: adoption.build_optimizer(s, known) for number, s in shipments.items()}
    state.values = unship(received["values"], device=state.device)

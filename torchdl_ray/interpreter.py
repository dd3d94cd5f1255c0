"""What each command does on a worker, once the worker has found that it may be done.

Runs on the worker; knows torch, not Ray. One function per command of program.py, chosen by the command's type. Commits
come here after all ranks agreed and what they reduce has been reduced; nothing here waits for a peer, except that a
clip factor is taken from rank 0.

Invariant: a commit does the same to every replica, given the same state.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import adoption, operations, program, tree
from .arrival import settle
from .calls import Call, Calls, Piece, seed_generators, seed_of
from .collective import Collective
from .program import Command, Forward, ShardData, WireTensor
from .replica import Replica, named_tensors
from .shipping import Shipment, dumps_on_cpu, unship

Payload = Sequence[Any]


@dataclass
class State:
    """Everything that a worker holds."""

    rank: int
    size: int
    device: torch.device
    collective: Collective
    calls: Calls
    replicas: dict[int, Replica] = field(default_factory=dict)
    optimizers: dict[int, Optimizer] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    # set by the worker before each command
    arm: Callable[[Replica], None] = lambda replica: None
    fused: program.Backward | None = None
    goes_back: bool = False  # the fused backward is running

    def known(self) -> dict[str, Tensor]:
        """All parameters of all models, by the name that optimizers use."""
        return {parameter_key(m, n): p for m, r in self.replicas.items() for n, p in r.parameters.items()}

    def key_of(self) -> Callable[[Tensor], str | None]:
        """The inverse of `known`."""
        names = {id(p): key for key, p in self.known().items()}
        return lambda tensor: names.get(id(tensor))

    def reads(self) -> bool:
        """Whether this rank answers for values that are equal on all."""
        return self.rank == 0


def parameter_key(model: int, name: str) -> str:
    """How a parameter is called where several models may meet."""
    return f"{model}:{name}"


@singledispatch
def execute(command: Command, state: State, payload: Payload) -> Any:
    """Do one command and return what the reply carries for it."""
    raise TypeError(f"a worker does not know the command {type(command).__name__}")


@execute.register
def _forward(command: Forward, state: State, payload: Payload) -> Any:
    replica = state.replicas[command.model]
    data: ShardData = payload[0]
    if command.training:
        replica.note_rows(data.weight if data.rows else 0.0)
    if state.fused is None:
        return state.calls.forward(replica.module, command, data, payload[1:])
    backward = state.fused
    replica.buckets.begin_local()

    def each(call: Call, piece: Piece, last: bool) -> None:
        if last:
            state.arm(replica)
        state.goes_back = True
        state.calls.piece_backward(call, piece, backward, (), 0)
        state.goes_back = False
        piece.outputs = [x.detach() if isinstance(x, Tensor) else x for x in piece.outputs]
        call.released = last

    return state.calls.forward(replica.module, command, data, payload[1:], each)


@execute.register
def _backward(command: program.Backward, state: State, payload: Payload) -> Any:
    replica = state.replicas[command.model]
    if command.full:
        replica.buckets.begin_local()
    return state.calls.backward(command, payload, (lambda: state.arm(replica)) if command.full else (lambda: None))


@execute.register
def _drop(command: program.Drop, state: State, payload: Payload) -> None:
    state.calls.drop(command.calls)
    for value in command.values:
        state.values.pop(value, None)
        state.optimizers.pop(value, None)


@execute.register
def _undo(command: program.Undo, state: State, payload: Payload) -> None:
    for replica in state.replicas.values():
        replica.undo()


@execute.register
def _zero_grad(command: program.ZeroGrad, state: State, payload: Payload) -> None:
    state.replicas[command.model].buckets.zero(command.names, command.to_none)


@execute.register
def _add_grad(command: program.AddGrad, state: State, payload: Payload) -> None:
    buckets = state.replicas[command.model].buckets
    buckets.begin_local()
    for name, wire in zip(command.names, payload, strict=True):
        if state.rank == 0:
            buckets.add(name, tree.from_wire(wire, state.device))


@execute.register
def _reduce(command: program.Reduce, state: State, payload: Payload) -> tuple[str, ...]:
    return tuple(n for n, here in state.replicas[command.model].buckets.present.items() if here)


@execute.register
def _clip(command: program.ClipGradNorm, state: State, payload: Payload) -> float:
    buckets = state.replicas[command.model].buckets
    grads = [g for g in map(buckets.grad, command.names) if g is not None]
    if not grads:
        return 0.0
    norm = torch.nn.utils.get_total_norm(grads, command.norm_type, error_if_nonfinite=False)
    state.collective.broadcast([norm], 0)  # one number for all, whatever the threads of each replica
    if command.error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {command.norm_type} for gradients is {norm.item()}, so it cannot be clipped; "
            "pass error_if_nonfinite=False to scale by it anyway"
        )
    factor = torch.clamp(command.max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
    return float(norm)


@execute.register
def _apply(command: program.Apply, state: State, payload: Payload) -> None:
    todo, kept = pickle.loads(command.body)

    def find(mark: program.Value | program.Gradient) -> Tensor | None:
        if isinstance(mark, program.Value):
            return state.values[mark.id]
        return state.replicas[mark.model].buckets.grad(mark.name)

    def share(tensors: Sequence[Tensor]) -> None:
        if state.size > 1:
            flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]
            state.collective.broadcast(flat, 0)
            for t, received in zip(tensors, flat, strict=True):
                t.copy_(received.view(t.dtype).view(t.shape))

    results = operations.run(todo, kept, find, share, state.device)
    state.values.update(zip(command.outputs, results, strict=True))


@execute.register
def _write(command: program.Write, state: State, payload: Payload) -> None:
    replica = state.replicas[command.model]
    targets = named_tensors(replica, command.names)
    with torch.no_grad():
        for name, wire in zip(command.names, payload, strict=True):
            targets[name].copy_(tree.from_wire(wire, writable=False))
    replica.refresh()


@execute.register
def _write_grad(command: program.WriteGrad, state: State, payload: Payload) -> None:
    buckets = state.replicas[command.model].buckets
    for name, wire in zip(command.names, payload, strict=True):
        buckets.write(name, tree.from_wire(wire, state.device))


@execute.register
def _configure(command: program.Configure, state: State, payload: Payload) -> None:
    replica = state.replicas[command.model]
    for name, training in command.modes:
        replica.modules[name].training = training
    if command.attributes:
        for (name, attribute), value in pickle.loads(command.attributes).items():
            setattr(replica.modules[name], attribute, value.to(state.device) if isinstance(value, Tensor) else value)
    if command.requires_grad:
        for name, requires in command.requires_grad:
            replica.parameters[name].requires_grad_(requires)
        replica.buckets.rebuild()


@execute.register
def _adopt(command: program.Adopt, state: State, payload: Payload) -> None:
    shipment: Shipment = payload[0]
    state.optimizers[command.optimizer] = adoption.build_optimizer(shipment, state.known())


@execute.register
def _step(command: program.Step, state: State, payload: Payload) -> None:
    optimizer = state.optimizers[command.optimizer]
    if command.groups:
        adoption.apply_groups(optimizer, command.groups, state.known())
    seed_generators(seed_of(command.key, 0, 0), state.device)
    optimizer.step()
    for replica in state.replicas.values():
        _take_gradients(replica)


def _take_gradients(replica: Replica) -> None:
    """Keep what a user's function set or cleared as `.grad`."""
    for name, p in replica.parameters.items():
        grad = p.grad
        if grad is not replica.buckets.grad(name):
            replica.buckets.zero((name,), to_none=True) if grad is None else replica.buckets.write(name, grad)


@execute.register
def _change(command: program.Change, state: State, payload: Payload) -> Any:
    replica = state.replicas[command.model]
    flags = [p.requires_grad for p in replica.parameters.values()]
    result = _call(command.body, replica.module)
    _take_gradients(replica)
    if flags != [p.requires_grad for p in replica.parameters.values()]:
        replica.buckets.rebuild()
    replica.refresh()
    return _at_home(result)


@execute.register
def _add_model(command: program.AddModel, state: State, payload: Payload) -> None:
    module = settle(unship(payload[0], device=state.device), state.device, command.seed, command.compiled)
    state.replicas[command.model] = Replica(module, state.rank, state.size)


@execute.register
def _drop_model(command: program.DropModel, state: State, payload: Payload) -> None:
    del state.replicas[command.model]


@execute.register
def _fetch(command: program.Fetch, state: State, payload: Payload) -> Any:
    call = state.calls.live[command.call]
    if call.structure is None or command.leaf >= len(call.structure.leaves):
        return None
    value = call.value(command.leaf)
    return tree.to_wire(value, copy=True) if isinstance(value, Tensor) else value


@execute.register
def _describe(command: program.Describe, state: State, payload: Payload) -> Any:
    return state.calls.live[command.call].shapes()


@execute.register
def _read_tensors(command: program.ReadTensors, state: State, payload: Payload) -> Any:
    if not state.reads():
        return None
    return _wires(named_tensors(state.replicas[command.model], command.names).values())


@execute.register
def _read_grads(command: program.ReadGrads, state: State, payload: Payload) -> Any:
    if not state.reads():
        return None
    buckets = state.replicas[command.model].buckets
    return _wires(map(buckets.grad, command.names))


@execute.register
def _read_value(command: program.ReadValue, state: State, payload: Payload) -> Any:
    return _wires([state.values[command.value]])[0] if state.reads() else None


@execute.register
def _read_optimizer(command: program.ReadOptimizer, state: State, payload: Payload) -> Any:
    if not state.reads():
        return None
    return adoption.ship_state(state.optimizers[command.optimizer], state.key_of(), command.state)


@execute.register
def _run(command: program.Run, state: State, payload: Payload) -> Any:
    if command.ranks is not None and state.rank not in command.ranks:
        return None
    return _at_home(_call(command.body, state.replicas[command.model].module))


def _at_home(result: Any) -> Any:
    """Tensors of a result on the CPU, without a graph: no CUDA tensor crosses to the driver.

    Raises:
        TypeError: something in it cannot travel.
    """
    leaves, spec = tree.flatten(result)
    return tree.unflatten(spec, [_travelled(leaf) for leaf in leaves])


def _travelled(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu()
    if isinstance(leaf, np.ndarray | int | float | str | bytes | None):
        return leaf
    try:
        return pickle.loads(dumps_on_cpu(leaf))
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(leaf).__name__}, which cannot travel to the driver ({error}); return "
            "tensors, numbers, or what pickle takes"
        ) from error


@execute.register
def _hash(command: program.Hash, state: State, payload: Payload) -> dict[str, str]:
    replica = state.replicas[command.model]
    found: dict[str, Tensor] = {**replica.parameters, **replica.buffers}
    for name in replica.parameters:
        grad = replica.buckets.grad(name)
        if grad is not None and not replica.buckets.pending:
            found[f"{name}.grad"] = grad
    names = state.key_of()
    for number, optimizer in state.optimizers.items():
        for p, values in optimizer.state.items():
            owner = names(p) if isinstance(p, Tensor) else p
            for key, value in values.items() if isinstance(values, dict) else [("", values)]:
                if isinstance(value, Tensor):
                    found[f"optimizer {number}: {owner}.{key}"] = value
    return {name: hash_tensor(tensor) for name, tensor in found.items()}


def _call(body: bytes, module: nn.Module) -> Any:
    function, args, kwargs = pickle.loads(body)
    return function(module, *args, **kwargs)


def _wires(tensors: Any) -> tuple[WireTensor | None, ...]:
    return tuple(None if t is None else tree.to_wire(t.detach(), copy=True) for t in tensors)


def hash_tensor(tensor: Tensor) -> str:
    """A hash of a tensor's bits, dtype and shape."""
    wire = tree.to_wire(tensor.detach())
    digest = hashlib.blake2b(f"{wire.dtype}{wire.shape}".encode(), digest_size=16)
    digest.update(wire.array.tobytes())
    return digest.hexdigest()

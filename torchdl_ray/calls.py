"""Live calls on a worker: forward on this rank's shard, the graph that waits for backward, and backward.

Runs on the worker. One `Call` holds the outputs of one `Forward` command, in pieces where `microbatch_size` cut the
shard. Nothing crosses but the arrays of the shard on their way in.

Invariants: a rank without rows, or whose rows weigh nothing, adds exact zeros and still takes part in every reduction;
the random numbers of a piece depend on (seed, version, ordinal, shard, piece) alone, so that a replay draws them again.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import tree
from .errors import BackwardError, StructureChanged
from .program import (
    Backward,
    CallResult,
    Cut,
    Forward,
    LeafKind,
    Link,
    RandomKey,
    Remote,
    Same,
    Seed,
    ShardData,
    Structure,
    WireTensor,
)
from .reading import Reading, read
from .shipping import dumps_on_cpu


@dataclass(slots=True)
class Piece:
    """One forward: its rows, its share of the whole batch, its output leaves, and its differentiable inputs."""

    rows: int
    weight: float
    outputs: list[Any]
    inputs: list[Tensor]


@dataclass(slots=True)
class Call:
    """The outputs of one `Forward` on this rank."""

    command: Forward
    rows: int
    structure: Structure | None = None
    pieces: list[Piece] = field(default_factory=list)
    whole_inputs: frozenset[int] = frozenset()  # inputs that every piece got whole: their gradients add up
    scalars: dict[int, Tensor] = field(default_factory=dict)  # the 0-dim outputs, joined
    released: bool = False

    def join_scalars(self) -> None:
        """Join the 0-dim outputs of the pieces, so that one that cannot be joined fails this call and no later command;
        does not wait for the device.
        """
        if self.structure is not None:
            kinds = enumerate(self.structure.leaves)
            self.scalars = {k: self.value(k) for k, kind in kinds if kind.tensor and kind.ndim == 0}

    def value(self, leaf: int) -> Any:
        """Output `leaf` of this rank, its pieces joined. A tensor comes detached."""
        if leaf in self.scalars:
            return self.scalars[leaf]
        values = [
            p.outputs[leaf].detach() if isinstance(p.outputs[leaf], Tensor) else p.outputs[leaf] for p in self.pieces
        ]
        if len(values) == 1:
            return values[0]
        rows, weights = [p.rows for p in self.pieces], [p.weight for p in self.pieces]
        reading = self.reading()
        mean = reading.reduction[leaf] != "sum"
        return tree.join_leaf(values, rows, weights, reading.dims[leaf], mean, f"output {leaf}")

    def reading(self) -> Reading:
        """How the leaves of several pieces become one."""
        assert self.structure is not None
        return read(self.structure, self.command.reduction, self.command.out_dims, self.command.dim)

    def result(self) -> CallResult:
        """What the driver is told unasked."""
        if self.structure is None:
            return CallResult(ran=False)
        known = self.command.expected is not None
        scalars, objects = [], {}
        shapes: list[tuple[int, ...] | None] = []
        for k, kind in enumerate(self.structure.leaves):
            if not kind.tensor:
                shapes.append(None)
                if kind.dtype != "None":
                    objects[k] = self.value(k)
            elif kind.ndim == 0:
                shapes.append(())
                scalars.append((k, self.value(k).item()))
            else:
                shapes.append(None if known else tuple(self.value(k).shape))
        return CallResult(
            ran=True,
            structure=None if known else self.structure,
            shapes=None if known else tuple(shapes),
            scalars=tuple(scalars),
            objects=dumps_on_cpu(objects) if objects else b"",
        )

    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of every output on this rank, None for objects that are no tensors."""
        if self.structure is None:
            return ()
        return tuple(
            tuple(self.value(k).shape) if kind.tensor else None for k, kind in enumerate(self.structure.leaves)
        )


def seed_of(key: RandomKey, shard: int, piece: int) -> int:
    """The seed of one piece: a hash, so that neighbouring keys give unrelated streams."""
    text = f"{key.seed}/{key.version}/{key.ordinal}/{shard}/{piece}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generator of the CPU and of this device; torch.manual_seed would take a hundred times as long."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def _leaf_kind(value: Any) -> LeafKind:
    if not isinstance(value, Tensor):
        return LeafKind(False, "None" if value is None else "object")
    return LeafKind(True, str(value.dtype).removeprefix("torch."), value.ndim, value.requires_grad)


class Calls:
    """All calls of a worker whose outputs may still be asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.live: dict[int, Call] = {}
        self.links: dict[Link, Tensor | None] = {}

    def drop(self, calls: Sequence[int]) -> None:
        """Forget calls, and with them their graphs."""
        for number in calls:
            self.live.pop(number, None)

    def clear(self) -> None:
        """Forget everything."""
        self.live.clear()
        self.links.clear()

    # ---- forward

    def forward(
        self,
        module: nn.Module,
        command: Forward,
        data: ShardData,
        common: Sequence[WireTensor],
        each: Callable[[Call, Piece, bool], None] | None = None,
    ) -> Call:
        """Run the module on the shard; `each`, if given, is called after every piece (with: is it the last?) and may
        run its backward, so that one piece's graph is alive at a time.
        """
        call = Call(command, data.rows)
        self.live[command.call] = call
        if data.rows == 0:
            return call
        leaves, spec = pickle.loads(command.template)
        call.whole_inputs = frozenset(n for n, i in enumerate(command.differentiable) if isinstance(leaves[i], Same))
        cut = [tree.unpack(a, self.device) for a in data.arrays]
        run: Callable[..., Any] = module if command.method == "forward" else getattr(module, command.method)
        start = 0
        for number, (rows, weight) in enumerate(data.pieces):
            seed_generators(seed_of(command.key, data.index, number), self.device)
            same = [tree.unpack(a, self.device) for a in common]  # anew: the piece before may have written to it
            whole = len(data.pieces) == 1
            mine = [
                self._leaf(leaf, cut, same, None if whole else slice(start, start + rows), command.dim)
                for leaf in leaves
            ]
            inputs = []
            for i in command.differentiable:
                mine[i] = mine[i].detach().requires_grad_(command.grad)
                inputs.append(mine[i])
            piece_args, piece_kwargs = tree.unflatten(spec, mine)
            with _modes(command, self.device):
                output = run(*piece_args, **piece_kwargs)
            self._record(call, output, rows, weight, inputs)
            start += rows
            del output, mine, same, inputs, piece_args, piece_kwargs  # so that one piece's graph is alive at a time
            if each is not None:
                each(call, call.pieces[-1], number == len(data.pieces) - 1)
        call.join_scalars()
        return call

    def _leaf(self, leaf: Any, cut: list[Any], same: list[Any], rows: slice | None, dim: int) -> Any:
        if isinstance(leaf, Cut):
            value = cut[leaf.index]
        elif isinstance(leaf, Same):
            return same[leaf.index]
        elif isinstance(leaf, Remote):
            value = self.live[leaf.call].value(leaf.leaf)
        else:
            return leaf
        if rows is None:
            return value
        return tree.cut(value, rows.start, rows.stop, dim)

    def _record(self, call: Call, output: Any, rows: int, weight: float, inputs: list[Tensor]) -> None:
        leaves, spec = tree.flatten(output, plain_lists=True)
        structure = Structure(spec, tuple(_leaf_kind(leaf) for leaf in leaves))
        expected = call.command.expected
        if expected is not None and structure != expected:
            raise StructureChanged(
                f"{call.command.method} returned {describe(structure)}, but {describe(expected)} in earlier calls "
                "of the same kind; build the model with dynamic_output=True if its output varies"
            )
        if call.structure is not None and structure != call.structure:
            raise StructureChanged(
                f"{call.command.method} returned {describe(structure)} for one microbatch and "
                f"{describe(call.structure)} for another; leave out microbatch_size"
            )
        call.structure = structure
        # a 0-dim output may be a view of something that a later step changes; a clone is cheap
        leaves = [
            x.clone() if isinstance(x, Tensor) and x.ndim == 0 and (x.is_leaf or x._is_view()) else x for x in leaves
        ]
        call.pieces.append(Piece(rows, weight, leaves, inputs))

    # ---- backward

    def backward(self, command: Backward, data: Sequence[WireTensor], arm: Callable[[], None]) -> tuple[Any, ...]:
        """Run backward through a call; `arm` is called before its last piece. Returns the wanted gradients of inputs,
        as WireTensors (None where there is none).
        """
        call = self.live.get(command.call)
        if call is None or call.released:
            raise BackwardError(
                f"the graph of call {command.call} is gone; pass retain_graph=True to the backward before"
            )
        arrived = [tree.from_wire(a, self.device) for a in data]
        found: list[list[Tensor | None]] = []
        start = 0
        for number, piece in enumerate(call.pieces):
            if number == len(call.pieces) - 1:
                arm()
            found.append(self.piece_backward(call, piece, command, arrived, start))
            start += piece.rows
        call.released = not command.keep_graph
        for seed in command.seeds:
            if isinstance(seed.source, Link):
                self.links.pop(seed.source, None)
        return self._return_inputs(call, command, found)

    def piece_backward(
        self, call: Call, piece: Piece, command: Backward, arrived: Sequence[Tensor], start: int
    ) -> list[Tensor | None]:
        """Backward through one piece; returns the gradients of its differentiable inputs."""
        outputs, grads = [], []
        for seed in command.seeds:
            if seed.leaf >= len(piece.outputs):
                continue  # an entry of a longer list, on another rank
            output = piece.outputs[seed.leaf]
            grad = self._seed(seed, output, call, piece, arrived, start)
            if grad is not None and output.requires_grad:
                outputs.append(output)
                grads.append(grad)
        if not outputs:
            return [None] * len(piece.inputs)
        if not command.full:
            return list(
                torch.autograd.grad(outputs, piece.inputs, grads, retain_graph=command.keep_graph, allow_unused=True)
            )
        torch.autograd.backward(outputs, grads, retain_graph=command.keep_graph)
        taken = [x.grad for x in piece.inputs]
        for x in piece.inputs:
            x.grad = None
        return taken

    def _seed(
        self, seed: Seed, output: Tensor, call: Call, piece: Piece, arrived: Sequence[Tensor], start: int
    ) -> Tensor | None:
        """The gradient with respect to one output of one piece; None where it is zero by its weight."""
        if isinstance(seed.source, WireTensor):
            if seed.weighted and piece.weight == 0:
                return None
            number = tree.from_wire(seed.source, output.device).to(output.dtype)
            return number * piece.weight if seed.weighted else number
        grad = arrived[seed.source.index] if isinstance(seed.source, Cut) else self.links.get(seed.source)
        if grad is None:
            return None
        if len(call.pieces) == 1:
            return grad.to(output.dtype)
        if output.ndim == 0:
            total = sum(p.weight for p in call.pieces)
            mean = call.reading().reduction[seed.leaf] != "sum"
            share = (piece.weight / total if total else 0.0) if mean else 1.0
            return (grad * share).to(output.dtype)
        return grad.narrow(call.reading().dims[seed.leaf], start, piece.rows).to(output.dtype)

    def _return_inputs(self, call: Call, command: Backward, found: list[list[Tensor | None]]) -> tuple[Any, ...]:
        def joined(i: int) -> Tensor | None:
            parts = [f[i] for f in found]
            if not parts or all(p is None for p in parts):
                return None
            whole = [
                torch.zeros_like(piece.inputs[i]) if p is None else p
                for p, piece in zip(parts, call.pieces, strict=True)
            ]
            if i in call.whole_inputs:
                return torch.stack(whole).sum(0)
            return whole[0] if len(whole) == 1 else torch.cat(whole, call.command.dim)

        for i in command.links:
            self.links[Link(command.id, i)] = joined(i)
        grads = [joined(i) for i in command.inputs]
        return tuple(None if g is None else tree.to_wire(g) for g in grads)


def describe(structure: Structure) -> str:
    """A structure in words, for error messages."""
    leaves = ", ".join(f"{k.dtype} of {k.ndim} dimensions" if k.tensor else "object" for k in structure.leaves)
    return f"{len(structure.leaves)} value(s) ({leaves}) in {structure.spec}"


@contextlib.contextmanager
def _modes(command: Forward, device: torch.device) -> Any:
    """The driver's grad mode and autocast state, on this device."""
    with contextlib.ExitStack() as stack:
        if command.inference:
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.set_grad_enabled(command.grad))
        cast = command.autocast
        if cast is not None:
            dtype = getattr(torch, cast.dtype)
            stack.enter_context(
                torch.autocast(device.type, dtype=dtype, enabled=cast.enabled, cache_enabled=cast.cache)
            )
        elif torch.is_autocast_enabled(device.type):  # with one local worker, that of the line that waits
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield

"""`RemoteCall`: one call of the model, as the driver's autograd engine sees it.

Runs on the driver. Both spellings of backward (`loss.backward()`, `model.backward()`) and losses computed on the driver
take the same path, the driver's own engine. Each call has one node, the *anchor*, which takes the driver's tensors and
the remote leaves that require grad, and a dummy leaf that stands for all parameters. The node of every output stashes
its gradient and hands a zero on, so the anchor runs last and once, and records one `Backward` for the workers.

What crosses: with `Backward`, the rows of gradients of outputs that were fetched, to their owners; nothing for a scalar
that was not. Gradients of inputs come back only where a tensor of the driver requires them; then the engine waits.

Invariant: nodes never point to RemoteTensors, so outputs that the user drops free the workers' graphs at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from . import tree
from .answer import Answer
from .entries import Pending
from .errors import BackwardError, UnsupportedError
from .graph import Anchor, Output, Shard, apply
from .program import Backward, Cut, Describe, Fetch, LeafKind, Link, Seed, Structure, WireTensor
from .reading import Reading
from .stream import Stream


class Owner(Protocol):
    """Who keeps the parameters (see remote_parameter.py) and hears of calls and gradients."""

    def before_call(self) -> int:
        """What the user changed on the driver travels first; returns a number that rises when modes, flags, attributes
        or structure have changed.
        """

    def before_backward(self) -> None:
        """Edited gradients travel first."""

    def after_backward(self) -> None:
        """What was read of gradients is void."""


@dataclass(frozen=True, slots=True)
class Input:
    """A differentiable input: a tensor of the driver that was cut, or went whole, or a leaf of an earlier call."""

    kind: str
    call: RemoteCall | None = None
    leaf: int = 0


@dataclass
class Stash:
    """Gradients of a call's outputs, kept until its anchor runs: of joined values, of single replicas' values by leaf
    and rank, and those that a later call's backward left on the workers.
    """

    seeds: dict[int, Tensor] = field(default_factory=dict)
    shard_seeds: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    links: list[tuple[int, Link]] = field(default_factory=list)

    def add(self, leaf: int, grad: Tensor) -> None:
        """Keep a gradient of the joined value."""
        held = self.seeds.get(leaf)
        self.seeds[leaf] = grad if held is None else held + grad

    def add_shard(self, leaf: int, rank: int, grad: Tensor) -> None:
        """Keep a gradient of one replica's value."""
        held = self.shard_seeds.setdefault(leaf, {}).get(rank)
        self.shard_seeds[leaf][rank] = grad if held is None else held + grad

    def add_link(self, leaf: int, link: Link) -> None:
        """Keep a gradient that lies on the workers."""
        self.links.append((leaf, link))


class RemoteCall:
    """A forward on all ranks: sizes and weights of its shards, what is known of its outputs, and its gradients.

    Args:
        stream, model, owner: where it was recorded.
        pending: the ranks' `CallResult`s.
        number: the call's number on the workers.
        sizes, weights: rows and share of the whole batch by rank.
        inputs: the differentiable inputs, in the order of the workers' list.
        grad: whether the call was made in grad mode.
        device: where outputs come to.
    """

    def __init__(
        self,
        stream: Stream,
        model: int,
        owner: Owner,
        pending: Pending,
        number: int,
        sizes: Sequence[int],
        weights: Sequence[float],
        inputs: Sequence[Input],
        grad: bool,
        device: torch.device,
    ) -> None:
        self.id = number
        self.stream, self.model, self.owner = stream, model, owner
        self.answer = Answer(pending, tuple(sizes), tuple(weights), device)
        self.sizes, self.weights = self.answer.sizes, self.answer.weights
        self.inputs = tuple(inputs)
        self.grad = grad
        self.device = device
        self._joinable: tuple[bool, ...] | None = None
        self.released = False
        self.theta_node: Any = None  # of a tensor that stands for all parameters
        self._watched: set[int] = set()
        self.stash = Stash()
        self._shapes: list[tuple[tuple[int, ...] | None, ...]] | None = None

    def __del__(self) -> None:
        self.stream.drop_call(self.id)

    def learn(self, structure: Structure, reading: Reading, joinable: tuple[bool, ...] | None = None) -> None:
        """Take in what the call returns; `joinable` says of each leaf whether it is rows, None: look at the shapes."""
        self.answer.structure, self.answer.reading, self._joinable = structure, reading, joinable

    def anchor(self, edges: Sequence[Tensor]) -> Tensor:
        """The token that all differentiable outputs hang on."""
        theta = torch.zeros((), requires_grad=True)
        self.theta_node = get_gradient_edge(theta).node
        return apply(Anchor, self, theta, *edges)

    # ---- what is known of the outputs

    def kind(self, leaf: int) -> LeafKind:
        """See `remote_tensor.Source`."""
        return self.answer.kind(leaf)

    def numbers(self) -> Answer:
        """See `remote_tensor.Source`."""
        return self.answer

    def watch(self, leaf: int) -> None:
        """See `remote_tensor.Source`."""
        self._watched.add(leaf)

    def rows(self) -> int:
        """See `remote_tensor.Source`."""
        return sum(self.sizes)

    def shapes(self, leaf: int) -> list[tuple[int, ...]]:
        """The leaf's shape on each rank that had rows; asks the workers once if they did not tell unasked."""
        if self._shapes is None:
            told = [result.shapes for result in self.answer.results()] if self.answer.told_shapes else [None]
            if any(shapes is None for shapes in told):
                asked = self.stream.record(Describe, call=self.id).wait("the shapes of a call's outputs")
                told = [asked[r] for r in self.answer.ranks()]
            self._shapes = [shapes for shapes in told if shapes is not None]
        return [(shapes[leaf] if leaf < len(shapes) else None) or () for shapes in self._shapes]

    def shape(self, leaf: int) -> torch.Size:
        """See `remote_tensor.Source`."""
        if self.kind(leaf).ndim == 0:
            return torch.Size(())
        shapes, dim = self.shapes(leaf), self.answer.dim(leaf)
        if len(shapes) == 1:
            return torch.Size(shapes[0])
        if not tree.joins(shapes, [self.sizes[r] for r in self.answer.ranks()], dim):
            self.value(leaf)  # raises, and says why
        whole = list(shapes[0])
        whole[dim] = sum(s[dim] for s in shapes)
        return torch.Size(whole)

    def joins(self, leaf: int) -> bool:
        """Whether the leaf is rows that another call may take where they lie."""
        if self._joinable is not None:
            return self._joinable[leaf]
        kind = self.kind(leaf)
        if not kind.tensor or kind.ndim <= self.answer.dim(leaf):
            return False
        return tree.joins(self.shapes(leaf), [self.sizes[r] for r in self.answer.ranks()], self.answer.dim(leaf))

    # ---- values

    def _parts(self, leaf: int) -> list[Tensor]:
        """The leaf's values on each rank that had rows, without a graph."""
        if self.kind(leaf).ndim == 0:
            return self.answer.parts(leaf)
        wires = self.stream.record(Fetch, call=self.id, leaf=leaf).wait("the values of a model's output")
        return [tree.from_wire(wires[r], self.device) for r in self.answer.ranks()]

    def value(self, leaf: int) -> Tensor:
        """The joined value, without a graph."""
        return self.answer.joined(leaf, self._parts(leaf))

    def fetch(self, leaf: int, token: Tensor | None) -> Tensor:
        """See `remote_tensor.Source`."""
        if token is None or not self.kind(leaf).requires_grad:
            return self.value(leaf)
        return apply(Output, self, leaf, token, True)

    def stand_in(self, leaf: int, token: Tensor) -> Tensor:
        """See `remote_tensor.Source`."""
        if not (self.grad and self.kind(leaf).requires_grad):
            return torch.zeros((), dtype=getattr(torch, self.kind(leaf).dtype))
        return apply(Output, self, leaf, token, False)

    def shards(self, leaf: int, token: Tensor | None) -> list[Tensor]:
        """See `remote_tensor.Source`."""
        parts = self._parts(leaf)
        if token is None or not self.kind(leaf).requires_grad:
            return parts
        return [
            apply(Shard, self, leaf, rank, token, part) for rank, part in zip(self.answer.ranks(), parts, strict=True)
        ]

    # ---- gradients

    def backward_from(self, leaf: int, keep_graph: bool) -> bool:
        """What the engine does for `backward()` of 0-dim output `leaf` itself: there is nothing else on its way.

        Returns: False, and has done nothing, where there is: inputs that get gradients, hooks.
        """
        if self.inputs or self._watched or not self.grad or not self.kind(leaf).requires_grad:
            return False
        self.stash.add(leaf, _one(self.kind(leaf).dtype)[0])
        self.run_backward(keep_graph, True, ())
        return True

    def run_backward(self, keep_graph: bool, full: bool, needs: Sequence[bool]) -> list[Tensor | None]:
        """Record the workers' backward from all stashed gradients; returns those of the inputs.

        Args:
            keep_graph: the engine's retain_graph.
            full: whether parameters get gradients (`backward`), or only inputs do (`autograd.grad`).
            needs: which inputs' gradients the engine wants.
        """
        stash, self.stash = self.stash, Stash()
        seeds, shard_seeds, links = stash.seeds, stash.shard_seeds, stash.links
        if self.released:
            raise BackwardError(
                "backward a second time through a call of the remote model whose graph was freed by the first; pass "
                "retain_graph=True to the first"
            )
        used = {*seeds, *shard_seeds, *(leaf for leaf, _ in links)}
        if self._watched and len(used) > 1 and self._watched & used:
            raise UnsupportedError(
                f"somebody looks at the gradient of output {min(self._watched)} of a call (a hook, retain_grad()), and "
                f"{len(used)} outputs of the same call take part in the backward: how one depends on another is known "
                "to the workers only. Look at it inside the module, or let one output take part"
            )
        wanted = [i for i, need in enumerate(needs) if need]
        if not full and not wanted:
            return [None] * len(needs)
        commands, arrays = self._seed_commands(seeds, shard_seeds)
        commands += [Seed(leaf, link) for leaf, link in links]
        payload = [tuple(self.stream.group.put(a) for a in mine) for mine in arrays]
        if full:
            self.owner.before_backward()
        pending = self.stream.record(
            Backward,
            payload,
            model=self.model,
            call=self.id,
            seeds=tuple(commands),
            keep_graph=keep_graph,
            full=full,
            inputs=tuple(i for i in wanted if self.inputs[i].call is None),
            links=tuple(i for i in wanted if self.inputs[i].call is not None),
        )
        self.released = not keep_graph
        if full:
            self.owner.after_backward()
        return self._input_gradients(pending, needs)

    def _seed_commands(
        self, seeds: dict[int, Tensor], shard_seeds: dict[int, dict[int, Tensor]]
    ) -> tuple[list[Seed], list[list[Any]]]:
        """Seeds, and by rank the arrays that they refer to."""
        assert self.answer.reading is not None
        commands: list[Seed] = []
        arrays: list[list[Any]] = [[] for _ in self.sizes]
        for leaf, grad in seeds.items():
            if self.kind(leaf).ndim == 0:
                weighted = self.answer.reading.reduction[leaf] != "sum"
                one, wire = _one(self.kind(leaf).dtype)
                commands.append(Seed(leaf, wire if grad is one else tree.to_wire(grad, copy=True), weighted))
                continue
            commands.append(Seed(leaf, Cut(len(arrays[0]))))
            start = 0
            for rank, size in enumerate(self.sizes):
                rows = grad if len(self.answer.ranks()) == 1 else grad.narrow(self.answer.dim(leaf), start, size)
                arrays[rank].append(tree.to_wire(rows if size else grad.new_zeros(0)))
                start += size
        for leaf, by_rank in shard_seeds.items():
            like = next(iter(by_rank.values()))
            commands.append(Seed(leaf, Cut(len(arrays[0]))))
            for rank, (size, part) in enumerate(zip(self.sizes, self._zeros(leaf, by_rank), strict=True)):
                arrays[rank].append(tree.to_wire(by_rank.get(rank, part) if size else like.new_zeros(0)))
        return commands, arrays

    def _zeros(self, leaf: int, by_rank: dict[int, Tensor]) -> list[Tensor]:
        """A zero gradient for each rank whose shard was not used."""
        like = next(iter(by_rank.values()))
        if len(by_rank) == len(self.answer.ranks()):
            return [like] * len(self.sizes)
        shapes = iter(self.shapes(leaf)) if self.kind(leaf).ndim else iter([()] * len(self.sizes))
        return [like.new_zeros(next(shapes)) if size else like for size in self.sizes]

    def _input_gradients(self, pending: Pending, needs: Sequence[bool]) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * len(needs)
        driver = [i for i, need in enumerate(needs) if need and self.inputs[i].call is None]
        for i, need in enumerate(needs):
            source = self.inputs[i].call
            if need and source is not None:
                source.stash.add_link(self.inputs[i].leaf, Link(pending.command.id, i))
                found[i] = torch.zeros(())
        if driver:
            answers = pending.wait("the gradients of a call's inputs")
            for place, i in enumerate(driver):
                parts = [answers[r][place] for r in self.answer.ranks()]
                grads = [None if p is None else tree.from_wire(p) for p in parts]
                found[i] = _joined(
                    grads, [self.sizes[r] for r in self.answer.ranks()], self.inputs[i].kind, self.inputs[i].leaf
                )
        return found


@functools.cache
def _one(dtype: str) -> tuple[Tensor, WireTensor]:
    """The gradient of a loss with respect to itself."""
    with torch.inference_mode(False):
        one = torch.ones((), dtype=getattr(torch, dtype))
    return one, tree.to_wire(one)


def _joined(grads: list[Tensor | None], sizes: Sequence[int], kind: str, dim: int) -> Tensor | None:
    """The gradient of a tensor of the driver from those of its shards."""
    known = [g for g in grads if g is not None]
    if not known:
        return None
    if kind == "same":
        return torch.stack(known).sum(0) if len(known) > 1 else known[0]
    whole = []
    for grad, size in zip(grads, sizes, strict=True):
        shape = list(known[0].shape)
        shape[dim] = size
        whole.append(known[0].new_zeros(shape) if grad is None else grad)
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim)

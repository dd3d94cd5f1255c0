"""`Caller`: turns `model(*args, **kwargs)` into one recorded `Forward`, and its answer into RemoteTensors.

Runs on the driver. What crosses with a call: each rank's rows, once, and what all ranks get alike, once. The rows are
taken from the caller's tensors at the call, so a batch buffer may be written again at once.

Which containers and which leaves a call returns is unknown before it ran. A *kind* of call (method, module modes, grad
mode, and what the inputs look like without their sizes) is waited for three times; if it returned the same each time
it is trusted, and the workers check it. A kind that ever varied, or that returns objects that are no tensors, always
waits.

Invariant: bad arguments raise before anything is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ray import cloudpickle
from torch import Tensor, nn

from . import tree
from .call_kind import Kind, signature
from .calls import describe
from .errors import ArgumentError, GatherError
from .graph import RemoteLink, Token, apply
from .layout import Layout, ShardPlan
from .program import CallResult, Cut, Forward, RandomKey, Remote, Same, ShardData, Structure
from .reading import Reading, read, told
from .recipe import Recipe, autocast, look
from .remote_call import Input, Owner, RemoteCall
from .remote_tensor import RemoteTensor
from .row_list import is_per_row, join_rows, whole_output
from .stream import Stream

MAX_TEMPLATES = 64
MAX_RECIPES = 64
_SMALL = frozenset((Cut, Same, type(None), bool, int, str))
Reduction = str | Mapping[Any, str]


@dataclass(frozen=True)
class Options:
    """How batches are cut and outputs read; the arguments of `DataParallel` of the same names."""

    dim: int = 0
    reduction: Reduction = "mean"
    out_dims: int | Mapping[Any, int] | None = None
    loss_weight: Callable[..., Any] | None = None
    microbatch_size: int | None = None
    output_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    dynamic_output: bool = False


class Shards:
    """An output that is no tensor and differs among the replicas; `shards` has one value per replica with rows."""

    def __init__(self, shards: Sequence[Any], reason: str) -> None:
        self.shards = list(shards)
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise GatherError(f"{self._reason} (asked for .{name})")

    def __repr__(self) -> str:
        return f"Shards({self.shards!r})"


class Caller:
    """Records the calls of one model.

    Args:
        stream: where.
        model: the model's number on the workers.
        module: the driver's copy, for its modes.
        owner: the model's parameters.
        layout: who gets which rows.
        options: see `Options`.
    """

    def __init__(
        self, stream: Stream, model: int, module: nn.Module, owner: Owner, layout: Layout, options: Options
    ) -> None:
        self.stream, self.model, self.module, self.owner = stream, model, module, owner
        self.layout, self.options = layout, options
        self.kinds: dict[Any, Kind] = {}
        self._templates: dict[Any, bytes] = {}
        self._recipes: dict[Any, Recipe] = {}
        self.losses: list[RemoteTensor] | None = None  # the last call's 0-dim floats with a graph
        stream.on_drop.append(self.forget)
        self._modules, self._parameters = list(module.modules()), list(module.parameters())
        self._reduction, self._out_dims = told(options.reduction), told(options.out_dims)

    def forget(self, *_: Any) -> None:
        """Trust no kind of call any more: something failed."""
        self.kinds.clear()
        self._recipes.clear()

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `method` of the module on all workers; returns its output with RemoteTensors as leaves.

        Costs no message by itself; waits for the output's structure the first three times.

        Raises:
            ScatterError, ArgumentError: inputs that cannot be cut; nothing was recorded.
        """
        seen = None if self.options.loss_weight is not None else look(method, args, kwargs)
        recipe = None if seen is None else self._recipes.get(seen)
        if recipe is not None and recipe.holds(self.owner.before_call(), self.layout):
            return self._repeat(recipe, (*args, *kwargs.values()))
        args, kwargs = self._localised(args), self._localised(kwargs)
        configuration = self.owner.before_call()
        plan = tree.plan(args, kwargs, self.options.dim, is_remote=self._rows_there)
        shards = self.layout.shards(plan.rows, self._row_weights(args, kwargs, plan.rows), self.options.microbatch_size)
        grad = torch.is_grad_enabled()
        modes = tuple(m.training for m in self._modules)
        if not any(modes):
            self.stream.level(self.model)
        kind = self.kinds.setdefault(self._key(method, modes, grad, plan), Kind())
        expected = None if self.options.dynamic_output else kind.trusted
        marks, common, inputs, edges = self._marks(plan, grad)
        payload = self._payload(plan, shards, marks, common)
        fields = {
            "model": self.model,
            "method": method,
            "template": self._template(marks, plan.spec),
            "differentiable": tuple(i for i, _, _ in inputs),
            "grad": grad,
            "inference": torch.is_inference_mode_enabled(),
            "training": any(modes),
            "autocast": autocast(),
            "dim": self.options.dim,
            "reduction": self._reduction,
            "out_dims": self._out_dims,
            "expected": expected,
        }
        call, token = self._record(fields, payload, shards, [source for _, source, _ in inputs], edges)
        if expected is None:
            return self._waited(call, token, kind)
        reading = self._reading(expected)
        if seen is not None and not common and "list_cut" not in plan.kind:
            cut = tuple(i for i, role in enumerate(plan.kind) if role == "cut")
            if len(self._recipes) >= MAX_RECIPES:
                self._recipes.clear()
            self._recipes[seen] = Recipe(
                configuration, self.layout, shards, fields, cut, expected, reading, kind.joinable
            )
        call.learn(expected, reading, kind.joinable)
        return self._outputs(call, token, None)

    def _repeat(self, recipe: Recipe, values: Sequence[Any]) -> Any:
        """A call that looks like one before."""
        if not recipe.fields["training"]:
            self.stream.level(self.model)
        call, token = self._record(
            recipe.fields, recipe.payload(values, self.stream.group.put), recipe.shards, (), tuple
        )
        call.learn(recipe.expected, recipe.reading, recipe.joinable)
        return self._outputs(call, token, None)

    def _record(
        self,
        fields: Mapping[str, Any],
        payload: list[tuple[Any, ...]],
        shards: Sequence[ShardPlan],
        inputs: Sequence[Input],
        edges: Callable[[], Sequence[Tensor]],
    ) -> tuple[RemoteCall, Token | None]:
        """Record the forward; returns the call and its anchor."""
        number, grad, stream = self.stream.new_id(), fields["grad"], self.stream
        key = RandomKey(self.options.seed, stream.version, stream.ordinal)
        pending = stream.record(Forward, payload, call=number, key=key, **fields)
        sizes, weights = tuple(s.rows for s in shards), tuple(s.weight for s in shards)
        device = self.options.output_device
        call = RemoteCall(stream, self.model, self.owner, pending, number, sizes, weights, inputs, grad, device)
        if not grad:
            return call, None
        token = Token(lambda: call.anchor(edges()))
        if inputs:
            token.tensor()  # their graph is as it is now
        return call, token

    def _template(self, marks: list[Any], spec: Any) -> bytes:
        """The pickle of marks and spec, kept where all marks are small values: making it takes long."""
        if not all(type(mark) in _SMALL for mark in marks):
            try:
                return bytes(cloudpickle.dumps((marks, spec)))
            except Exception as error:
                raise ArgumentError(
                    f"an argument of the call cannot travel to the workers: {type(error).__name__}: {error}. Arguments "
                    "are tensors, arrays, and objects that pickle; build the rest inside the module"
                ) from error
        key = spec, tuple((type(mark), mark) for mark in marks)
        found = self._templates.get(key)
        if found is None:
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            found = self._templates[key] = bytes(cloudpickle.dumps((marks, spec)))
        return found

    # ---- inputs

    def _localised(self, values: Any) -> Any:
        """Fetch the RemoteTensors that cannot stay where they are."""
        leaves, spec = tree.flatten(values)
        if not any(isinstance(leaf, RemoteTensor) for leaf in leaves):
            return values
        return tree.unflatten(spec, [x if self._rows_there(x) is not None else _fetch(x) for x in leaves])

    def _rows_there(self, leaf: Any) -> int | None:
        """The rows of a leaf that this stream's workers hold cut as this call will be."""
        if not isinstance(leaf, RemoteTensor):
            return None
        found = leaf.source()
        if found is None:
            return None
        call, number, _ = found
        if (
            not isinstance(call, RemoteCall)
            or call.stream is not self.stream
            or call.answer.dim(number) != self.options.dim
        ):
            return None
        return call.rows() if call.joins(number) else None

    def _row_weights(self, args: Any, kwargs: Any, rows: int) -> list[float] | None:
        if self.options.loss_weight is None:
            return None
        with torch.no_grad():
            weights = self.options.loss_weight(*args, **kwargs)
        found = weights.tolist() if isinstance(weights, Tensor | np.ndarray) else weights
        if not isinstance(found, Sequence) or len(found) != rows or any(isinstance(w, Sequence) for w in found):
            what = f"shape {list(weights.shape)}" if isinstance(weights, Tensor | np.ndarray) else repr(weights)[:80]
            raise ArgumentError(f"loss_weight returned {what} for a batch of {rows} rows; expected one number per row")
        return [float(w) for w in found]

    def _marks(
        self, plan: tree.Plan, grad: bool
    ) -> tuple[list[Any], list[Any], list[tuple[int, Input, Any]], Callable[[], list[Tensor]]]:
        """The leaves with marks in place of tensors, the common arrays, and the differentiable inputs."""
        marks: list[Any] = []
        common: list[Any] = []
        inputs: list[tuple[int, Input, Any]] = []
        num_cut = 0
        for leaf, kind in zip(plan.leaves, plan.kind, strict=True):
            if kind in ("cut", "same_tensor") and isinstance(leaf, Tensor):
                tree.check_sendable(leaf)
        for i, (leaf, kind) in enumerate(zip(plan.leaves, plan.kind, strict=True)):
            wants = grad and isinstance(leaf, Tensor) and not isinstance(leaf, RemoteTensor) and leaf.requires_grad
            if kind in ("cut", "list_cut"):
                marks.append(Cut(num_cut))
                num_cut += 1
                if wants:
                    inputs.append((i, Input("cut", None, self.options.dim), leaf))
            elif kind == "remote":
                call, number, differentiable = leaf.source()
                marks.append(Remote(call.id, number))
                if grad and differentiable:
                    leaf.feed()
                    inputs.append((i, Input("remote", call, number), (call, leaf._token.tensor())))
            elif kind == "same_tensor":
                marks.append(Same(len(common)))
                common.append(leaf)
                if wants:
                    inputs.append((i, Input("same"), leaf))
            else:
                marks.append(leaf)

        def edges() -> list[Tensor]:
            return [apply(RemoteLink, *value) if s.call is not None else value for _, s, value in inputs]

        return marks, common, inputs, edges

    def _payload(
        self, plan: tree.Plan, shards: Sequence[ShardPlan], marks: Sequence[Any], common: Sequence[Any]
    ) -> list[tuple[Any, ...]]:
        cut = [i for i, mark in enumerate(marks) if isinstance(mark, Cut)]
        same = tuple(self.stream.group.put(tree.pack(value, cloudpickle.dumps)) for value in common)
        payload = []
        for shard in shards:
            arrays = tuple(tree.pack(plan.cut(i, shard.start, shard.stop), cloudpickle.dumps) for i in cut)
            data = ShardData(shard.index, shard.rows, shard.pieces, arrays)
            payload.append((self.stream.group.put(data), *same))
        return payload

    def _key(self, method: str, modes: tuple[bool, ...], grad: bool, plan: tree.Plan) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            leaves = tuple(signature(leaf, kind, grad) for leaf, kind in zip(plan.leaves, plan.kind, strict=True))
            frozen = tuple(p.requires_grad for p in self._parameters) if grad else ()
        return method, modes, frozen, grad, torch.is_inference_mode_enabled(), autocast(), plan.spec, leaves

    # ---- outputs

    def _waited(self, call: RemoteCall, token: Token | None, kind: Kind) -> Any:
        results = call.answer.results()
        structures = [r.structure for r in results if r.structure is not None]
        first, sizes = structures[0], [call.sizes[r] for r in call.answer.ranks()]
        alike = all(s == first for s in structures)
        longest = max(structures, key=lambda s: len(s.leaves))
        call.learn(longest, self._reading(longest))
        if alike and not kind.row_list:
            kind.columns |= kind.structure == first and kind.rows != call.rows()
            kind.row_list = not kind.columns and is_per_row(call, first, sizes)
        elif not alike:
            kind.varied = True
            kind.row_list = whole_output(structures, sizes)
        if kind.row_list and whole_output(structures, sizes):
            kind.varied = True
            joined = join_rows(call, structures, results, token)
            self._note_losses(tree.flatten(joined)[0])
            return joined
        if not alike:
            other = next(s for s in structures if s != first)
            raise GatherError(
                f"the replicas returned different structures: {describe(first)} on rank {call.answer.ranks()[0]}, and "
                f"{describe(other)} on another; only a list with one entry per row, which is the whole output, may "
                "differ. Return the same structure for every shard, or call model.run"
            )
        kind.meet(first, tuple(call.joins(k) for k in range(len(first.leaves))), call.rows())
        return self._outputs(call, token, results)

    def _outputs(self, call: RemoteCall, token: Token | None, results: Sequence[CallResult] | None) -> Any:
        assert call.answer.structure is not None
        objects = [cloudpickle.loads(r.objects) if r.objects else {} for r in results or ()]
        leaves: list[Any] = []
        for k, leaf in enumerate(call.answer.structure.leaves):
            if leaf.tensor:
                leaves.append(RemoteTensor.of(call, k, token, self.options.output_device))
            elif leaf.dtype == "None":
                leaves.append(None)
            else:
                leaves.append(self._object(call, k, [o[k] for o in objects]))
        self._note_losses(leaves)
        return tree.unflatten(call.answer.structure.spec, leaves)

    def _note_losses(self, leaves: Sequence[Any]) -> None:
        found = [x for x in leaves if isinstance(x, RemoteTensor)]
        self.losses = [x for x in found if x.is_scalar() and x.wants_grad()]

    def _object(self, call: RemoteCall, leaf: int, values: list[Any]) -> Any:
        """One value of objects that are no tensors, by the rules for tensors."""
        assert call.answer.structure is not None
        assert call.answer.reading is not None
        ranks = call.answer.ranks()
        sizes, weights = [call.sizes[r] for r in ranks], [call.weights[r] for r in ranks]
        path = tree.paths(call.answer.structure.spec, "output")[leaf]
        reduction = call.answer.reading.reduction[leaf]
        if len(values) > 1 and all(type(v) in (int, float) for v in values) and len(set(values)) > 1:
            if reduction == "sum":
                return sum(values)
            if any(isinstance(v, float) for v in values):
                total = sum(weights)
                return sum(v * w for v, w in zip(values, weights, strict=True) if w) / (total or 1.0)
        try:
            return tree.join_leaf(values, sizes, weights, call.answer.dim(leaf), reduction != "sum", path)
        except GatherError as error:
            return Shards(values, str(error))

    def _reading(self, structure: Structure) -> Reading:
        return read(structure, self._reduction, self._out_dims, self.options.dim)


def _fetch(leaf: Any) -> Any:
    return leaf.fetch() if isinstance(leaf, RemoteTensor) else leaf

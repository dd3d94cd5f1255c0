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
from .calls import describe
from .errors import ArgumentError, GatherError
from .graph import RemoteLink, apply, wide
from .layout import Layout, ShardPlan
from .program import Autocast, CallResult, Cut, Forward, RandomKey, Remote, Same, ShardData, Structure
from .reading import Reading, read, told
from .remote_call import Input, Owner, RemoteCall
from .remote_tensor import RemoteTensor
from .row_list import is_per_row, join_rows, whole_output
from .stream import Stream

TRUSTED_AFTER = 3
MAX_TEMPLATES = 64
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


@dataclass
class Kind:
    """What is known of one kind of call."""

    structure: Structure | None = None
    joinable: tuple[bool, ...] = ()
    met: int = 0
    varied: bool = False
    row_list: bool = False  # it returned a list with one entry per row
    columns: bool = False  # it returned as many leaves for other numbers of rows
    rows: int = 0  # of the last call

    def meet(self, structure: Structure, joinable: tuple[bool, ...], rows: int) -> None:
        """Take in what one call of so many rows returned."""
        self.rows = rows
        if self.structure is not None and (structure != self.structure or joinable != self.joinable):
            self.varied = True
        self.structure, self.joinable = structure, joinable
        self.met += 1

    @property
    def trusted(self) -> Structure | None:
        """The structure to count on, if any."""
        known = self.structure
        if known is None or self.varied or self.met < TRUSTED_AFTER:
            return None
        return None if any(not k.tensor and k.dtype != "None" for k in known.leaves) else known


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
        stream.on_drop.append(self.forget)
        self._modules, self._parameters = list(module.modules()), list(module.parameters())
        self._reduction, self._out_dims = told(options.reduction), told(options.out_dims)

    def forget(self, *_: Any) -> None:
        """Trust no kind of call any more: something failed."""
        self.kinds.clear()

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `method` of the module on all workers; returns its output with RemoteTensors as leaves.

        Costs no message by itself; waits for the output's structure the first three times.

        Raises:
            ScatterError, ArgumentError: inputs that cannot be cut; nothing was recorded.
        """
        args, kwargs = self._localised(args), self._localised(kwargs)
        self.owner.before_call()
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
        number = self.stream.new_id()
        pending = self.stream.record(
            Forward,
            payload,
            model=self.model,
            call=number,
            method=method,
            template=self._template(marks, plan.spec),
            differentiable=tuple(i for i, _, _ in inputs),
            grad=grad,
            inference=torch.is_inference_mode_enabled(),
            training=any(modes),
            autocast=_autocast(),
            key=RandomKey(self.options.seed, self.stream.version, self.stream.ordinal),
            dim=self.options.dim,
            reduction=self._reduction,
            out_dims=self._out_dims,
            expected=expected,
        )
        call = RemoteCall(
            self.stream,
            self.model,
            self.owner,
            pending,
            number,
            [s.rows for s in shards],
            [s.weight for s in shards],
            [source for _, source, _ in inputs],
            grad,
            self.options.output_device,
        )
        token = None
        if grad:
            with wide():
                token = call.anchor(edges())
        if expected is not None:
            call.learn(expected, self._reading(expected), kind.joinable)
            return self._outputs(call, token, None)
        return self._waited(call, token, kind)

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
                    inputs.append((i, Input("remote", call, number), (call, leaf._token)))
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
            leaves = tuple(_signature(leaf, kind, grad) for leaf, kind in zip(plan.leaves, plan.kind, strict=True))
            frozen = tuple(p.requires_grad for p in self._parameters) if grad else ()
        return method, modes, frozen, grad, torch.is_inference_mode_enabled(), _autocast(), plan.spec, leaves

    # ---- outputs

    def _waited(self, call: RemoteCall, token: Tensor | None, kind: Kind) -> Any:
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
            return join_rows(call, structures, results, token)
        if not alike:
            other = next(s for s in structures if s != first)
            raise GatherError(
                f"the replicas returned different structures: {describe(first)} on rank {call.answer.ranks()[0]}, and "
                f"{describe(other)} on another; only a list with one entry per row, which is the whole output, may "
                "differ. Return the same structure for every shard, or call model.run"
            )
        kind.meet(first, tuple(call.joins(k) for k in range(len(first.leaves))), call.rows())
        return self._outputs(call, token, results)

    def _outputs(self, call: RemoteCall, token: Tensor | None, results: Sequence[CallResult] | None) -> Any:
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
        return tree.unflatten(call.answer.structure.spec, leaves)

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


def _signature(leaf: Any, kind: str, grad: bool) -> Any:
    """What of an input the output's structure may depend on: None, bools, strings and small ints by value; of tensors
    and arrays the dtype, the number of dimensions, and whether they require grad.
    """
    if isinstance(leaf, RemoteTensor):
        found = leaf.source()
        return kind, leaf.dtype, leaf.known_ndim(), grad and found is not None and found[2]
    if isinstance(leaf, Tensor):
        return kind, leaf.dtype, leaf.ndim, grad and leaf.requires_grad
    if isinstance(leaf, np.ndarray):
        return kind, leaf.dtype.str, leaf.ndim
    if kind != "object":
        return kind
    if leaf is None or isinstance(leaf, bool | str):
        return leaf, type(leaf)
    if isinstance(leaf, int) and abs(leaf) < 1024:
        return leaf, int
    return type(leaf)


def _autocast() -> Autocast | None:
    """The driver's autocast state; the workers use it for their own kind of device."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            return Autocast(True, dtype, torch.is_autocast_cache_enabled())
    return None

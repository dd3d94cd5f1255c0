"""The gradients of one model as the driver knows them: which are None, what was recorded, what is still to be sent.

Runs on the driver; one `Gradients` per model. What crosses: operations on gradients as one `Apply`, names set to None
as one `ZeroGrad`, tensors that the user assigned as one `WriteGrad`, gradients that the driver's own autograd made (a
penalty on the weights) as one `AddGrad`; each with the next command that gradients matter to. Which gradients are None
after a backward is asked once (`Reduce`), when somebody wants to know.

Invariant: what plain PyTorch would do to `.grad` in the same order of statements has been recorded, in that order,
before any command that reads or changes gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import program
from .errors import UnsupportedError
from .operations import Operation, replaced
from .remote_gradient import RemoteGradient
from .stream import Stream
from .values import MAX_OPERATIONS, Batch, Cell
from .wire import from_wire, to_wire

OFF = torch._C.DisableTorchFunctionSubclass
T: Any = Tensor
_SOMETHING = torch.empty(0)


class Gradients:
    """All gradients of a model.

    Args:
        stream: where commands go.
        model: the model's number on the workers.
        parameters: by name, as the driver has them.
        configure: sends changed `requires_grad` flags.
    """

    def __init__(
        self, stream: Stream, model: int, parameters: Mapping[str, nn.Parameter], configure: Callable[[], None]
    ) -> None:
        self.stream, self.model, self.parameters = stream, model, parameters
        self.epoch = 0
        self._configure = configure
        self._clock = 0  # rises when gradients may have changed on the workers by themselves
        self._unreduced = False
        self._present: dict[str, bool | None] = dict.fromkeys(parameters, False)
        self._metas: dict[str, Tensor] = {}
        self._handles: weakref.WeakValueDictionary[str, RemoteGradient] = weakref.WeakValueDictionary()
        self._views: dict[str, weakref.WeakSet[Cell]] = {}
        self._batch = Batch()
        self._zeroed: dict[str, None] = {}
        self._assigned: dict[str, tuple[Tensor, int]] = {}  # the user's own tensors, and their version when last sent
        self._former: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # such tensors that a backward went past
        self._own: dict[str, Tensor] = {}

    # ---- .grad

    def get(self, name: str) -> Tensor | None:
        """`.grad` of a parameter. Waits only where nobody knows yet whether it is None."""
        if name in self._assigned:
            return self._assigned[name][0]
        if self._present[name] is None:
            self._learn()
        return self.handle(name) if self._present[name] else None

    def if_any(self, name: str) -> Tensor | None:
        """For who will set the gradient to None in any case: None where it is None, else some tensor. Never waits."""
        return None if self._present[name] is False else _SOMETHING

    def handle(self, name: str) -> RemoteGradient:
        """The one handle of a gradient that is not None."""
        found = self._handles.get(name)
        if found is None:
            found = self._handles[name] = RemoteGradient(Cell(self, self._meta(name), name, None))
        return found

    def set(self, name: str, value: Tensor | None) -> None:
        """`p.grad = value`."""
        if value is None:
            self.zero((name,), True)
            return
        if isinstance(value, RemoteGradient):
            cell = value._cell
            if name in (cell.name, cell.base) and cell.owner is self and cell.meta.numel() == self._meta(name).numel():
                return  # its own gradient
            if cell.name is not None or cell.base is not None:
                raise UnsupportedError(
                    f"the gradient of '{name}' cannot share its memory with that of '{cell.name or cell.base}'; assign "
                    "a copy: p.grad = q.grad.clone()"
                )
            if cell.owner is self and self.get(name) is not None and name not in self._assigned:
                self._rebind(name, value)
                return
            value = value.fetch()
        self._check(name, value)
        self._leave(name)
        self._own.pop(name, None)
        self._assigned[name], self._present[name] = (value, -1), True

    def _check(self, name: str, value: Tensor) -> None:
        """Raise what plain PyTorch would raise for a gradient of another shape, dtype or device."""
        with OFF():
            p = self.parameters[name]
            T.grad.__set__(p, value)
            T.grad.__set__(p, None)

    def _rebind(self, name: str, value: RemoteGradient) -> None:
        """Make a result the gradient: copy it there, and let its handle stand for the gradient from now on."""
        self._check(name, torch.empty_like(value._cell.meta, device=self._device(name)))
        self._leave(name)
        gradient, old = Cell(self, self._meta(name), name, None), value._cell
        self._settle()
        copy = Operation(("Tensor", "copy_"), (gradient.mark(), old.mark()), {})
        self._batch.append(copy, [old], [], 1)
        torch.autograd.graph.increment_version(gradient.meta)
        value._cell, self._handles[name] = gradient, value

    def _device(self, name: str) -> torch.device:
        with OFF():
            return self.parameters[name].device

    def _meta(self, name: str) -> Tensor:
        if name not in self._metas:
            with OFF():
                p = self.parameters[name].detach()
                self._metas[name] = torch.empty_like(p, device="meta")  # keeps the strides of what is dense
        return self._metas[name]

    def _leave(self, name: str) -> None:
        """The gradient's memory is about to be used anew: whoever holds a handle or a view keeps the present value."""
        handle = self._handles.pop(name, None)
        cells = [handle._cell] if handle is not None else []
        cells += [c for c in self._views.pop(name, ()) if c.base == name]
        for cell in cells:
            self._settle()
            clone, kept = Operation(("Tensor", "clone"), (cell.mark(),), {}), cell.kept
            cell.name = cell.base = cell.cached = None
            cell.meta = torch.empty_like(cell.meta)
            self._batch.append(clone, [cell], [cell], 1)
            del kept

    def zero(self, names: Iterable[str], to_none: bool) -> None:
        """Set gradients to None, or to zeros where they are not None and `to_none` is False."""
        if to_none:
            for name in names:
                if self._present[name] is False:
                    continue
                if self._handles or self._views:
                    self._leave(name)
                self._assigned.pop(name, None)
                self._own.pop(name, None)
                self._present[name] = False
                self._zeroed[name] = None
            return
        wanted = tuple(names)
        for name in wanted:
            if name in self._assigned:
                self._assigned[name][0].detach().zero_()
        rest = tuple(n for n in wanted if n not in self._assigned and self._present[n] is not False)
        if rest:
            self.flush()
            self.stream.record(program.ZeroGrad, model=self.model, names=rest, to_none=False)
            self._clock += 1
            self._unreduced = True

    def add_own(self, name: str, grad: Tensor) -> None:
        """A gradient that the driver's own autograd made for a parameter."""
        dense = grad if grad.layout is torch.strided else grad.to_dense()
        if name in self._assigned:
            with torch.no_grad():
                self._assigned[name][0].add_(dense)
            return
        old = self._own.get(name)
        self._own[name] = dense if old is None else old + dense
        self._present[name] = True
        torch.autograd.graph.increment_version(self._meta(name))

    # ---- operations

    def note(self, operation: Operation, cells: Sequence[Cell], leaves: Sequence[Tensor | None]) -> list[Cell | None]:
        """Record an operation on `cells`, which stand among its arguments, with results of the shapes of `leaves`.

        Returns:
            for each result its cell, None where it is no new value.
        """
        owners = {id(c.owner): c.owner for c in cells}
        for owner in owners.values():
            assert isinstance(owner, Gradients)
            owner._settle()
            if len(owners) > 1:
                owner.flush()
        args, kwargs = replaced((operation.args, operation.kwargs), lambda x: x.mark() if isinstance(x, Cell) else x)
        known = {id(c.meta) for c in cells}
        bases = {c.meta.untyped_storage()._cdata: c for c in cells if c.name or c.base}
        made: list[Cell | None] = []
        for leaf in leaves:
            if leaf is None or id(leaf) in known:
                made.append(None)
                continue
            shared = bases.get(leaf.untyped_storage()._cdata)
            cell = Cell(self, leaf, None, None if shared is None else shared.name or shared.base)
            made.append(cell)
            if shared is not None and cell.base is not None:
                assert isinstance(shared.owner, Gradients)
                shared.owner._views.setdefault(cell.base, weakref.WeakSet()).add(cell)
        self._batch.append(Operation(operation.function, args, kwargs), cells, made, len(leaves))
        if len(owners) > 1 or self.stream.sync or len(self._batch.operations) >= MAX_OPERATIONS:
            self.flush()
        return made

    def _record_batch(self) -> None:
        if self._batch.record(self.stream):
            self._unreduced = False

    # ---- reading and writing

    def fetch(self, cell: Cell) -> Tensor:
        """The value as a plain tensor, the same object until it changes on the workers."""
        self.flush()
        if cell.cached is not None and cell.cached[1:] == (self._clock, cell.meta._version):
            return cell.cached[0]
        if self._unreduced and (cell.name or cell.base):
            self.stream.record(program.Reduce, model=self.model)
            self._unreduced = False
        if cell.name is None:
            mark = cell.mark()
            assert isinstance(mark, program.Value)
            found = self.stream.record(program.ReadValue, value=mark.id).wait("a value computed from gradients")
            self._keep(cell, found[0])
        else:
            names = self._names_to_fetch(cell.name)
            found = self.stream.record(program.ReadGrads, model=self.model, names=names).wait("gradients")
            for name, wire in zip(names, found[0], strict=True):
                if wire is not None:
                    self._keep(cell if name == cell.name else self.handle(name)._cell, wire)
        assert cell.cached is not None
        return cell.cached[0]

    def _keep(self, cell: Cell, wire: program.WireTensor) -> None:
        cell.cached = (from_wire(wire), self._clock, cell.meta._version)

    def _names_to_fetch(self, name: str) -> tuple[str, ...]:
        """This one; but all that somebody holds where another was fetched before."""
        held = {n: h._cell for n, h in self._handles.items()}
        if any(c.cached is not None and c.cached[1] == self._clock for n, c in held.items() if n != name):
            return (name, *(n for n in held if n != name))
        return (name,)

    def overwrite(self, cell: Cell, value: Tensor) -> None:
        """Put the driver's values in the place of a value on the workers."""
        if value.shape != cell.meta.shape:
            raise UnsupportedError(
                f"a gradient of shape {tuple(cell.meta.shape)} cannot get data of shape {tuple(value.shape)}"
            )
        self.flush()
        torch.autograd.graph.increment_version(cell.meta)
        if cell.name is not None:
            self._write({cell.name: value.to(cell.meta.dtype)})
        else:
            copy = Operation(("Tensor", "copy_"), (cell.mark(), value.detach().clone()), {})
            self._batch.append(copy, [cell], [], 1)
        if value.dtype == cell.meta.dtype:
            cell.cached = (value, self._clock, cell.meta._version)

    def _write(self, values: Mapping[str, Tensor]) -> None:
        handles = tuple(self.stream.group.put(to_wire(v)) for v in values.values())
        payload = [handles] * self.stream.group.size
        self.stream.record(program.WriteGrad, payload, model=self.model, names=tuple(values))
        self._unreduced = False

    def _learn(self) -> None:
        """Ask which gradients are not None. Waits for the backward."""
        self.flush()
        found = self.stream.record(program.Reduce, model=self.model).wait("which gradients are None")
        self._unreduced = False
        here = set(found[0])
        self._present = {name: name in here for name in self._present}

    # ---- sending

    def flush(self) -> None:
        """Record everything that was done to gradients on the driver. Costs no message by itself."""
        self._record_batch()
        self._settle()

    def _settle(self) -> None:
        """Record what is not an operation, and the operations before it."""
        for name, (former, version) in self._former.items():
            tensor = former()
            if tensor is not None and tensor._version != version:
                raise UnsupportedError(
                    f"the tensor that was assigned as gradient of '{name}' was written to after a backward had added "
                    "to the gradient on the workers; use p.grad, or assign the tensor again"
                )
        changed = {n: t for n, (t, sent) in self._assigned.items() if t._version != sent}
        if not (changed or self._zeroed or self._own):
            return
        self._record_batch()
        if self._zeroed:
            names, self._zeroed = tuple(self._zeroed), {}
            self.stream.record(program.ZeroGrad, model=self.model, names=names, to_none=True)
        if changed or self._own:
            self._configure()
        if changed:
            self._write(changed)
            self._assigned.update({n: (t, t._version) for n, t in changed.items()})
        if self._own:
            own, self._own = self._own, {}
            handles = tuple(self.stream.group.put(to_wire(g)) for g in own.values())
            self.stream.record(program.AddGrad, [handles] * self.stream.group.size, model=self.model, names=tuple(own))
            self._unreduced = True

    # ---- what happened on the workers

    def after_backward(self) -> None:
        """Gradients were added to on the workers; more of them may be there than before."""
        self._clock += 1
        self._unreduced = True
        self._present = {name: here or None for name, here in self._present.items()}
        for name, (tensor, version) in self._assigned.items():
            self._former[name] = (weakref.ref(tensor), version)
        self._assigned.clear()

    def after_commit(self) -> None:
        """An optimizer stepped: gradients are reduced, and it may have changed them."""
        self._clock += 1
        self._unreduced = False

    def invalidate(self) -> None:
        """Recorded commands were dropped after a failure: nothing is known of the workers' gradients."""
        self.epoch += 1
        self._clock += 1
        self._unreduced = True
        self._batch.clear()
        self._zeroed, self._own = {}, {}
        self._assigned = {name: (tensor, -1) for name, (tensor, _) in self._assigned.items()}
        self._present = {name: True if name in self._assigned else None for name in self._present}

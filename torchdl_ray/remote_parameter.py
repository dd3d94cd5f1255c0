"""The parameters and buffers of one wrapped module, whose copies live on the workers.

Runs on the driver. The parameters change class in place (see watched.py), so that optimizers made before hold the same
objects. What crosses: values that somebody reads after a commit, once (`ReadTensors`: the first look brings one tensor,
a look at a second one brings all); values that the user wrote (`Write`), and changed modes, attributes and flags
(`Configure`), with the next command.

Memory that left torch (numpy arrays, storages) is compared with a copy before each command while somebody holds it, and
is brought up to date at each commit.

Invariant: reading gives the newest value, or raises; a write travels before the next command, or raises.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from ray import cloudpickle
from torch import Tensor, nn

from . import program
from .errors import ClosedError, TorchdlError, UnsupportedError
from .gradients import OFF, Gradients
from .module_state import Difference, ModuleState, check_wrappable
from .remote_gradient import RemoteGradient
from .stream import Stream
from .watched import RemoteBuffer, RemoteParameter, RemoteView
from .wire import from_wire, to_wire

__all__ = ["Parameters", "RemoteBuffer", "RemoteParameter", "RemoteView", "claim", "hub_of"]

T: Any = Tensor


def hub_of(tensor: Any) -> Parameters | None:
    """The hub of a remote parameter or buffer, None for any other object."""
    if not isinstance(tensor, RemoteParameter | RemoteBuffer):
        return None
    hub = tensor._place[0]
    return hub if isinstance(hub, Parameters) else None


def claim(module: nn.Module) -> None:
    """Make a module ready to be wrapped: whatever an earlier wrapping left is brought home, and what cannot be wrapped
    is refused by name. To be called before the module is shipped.

    Raises:
        UnsupportedError: see `check_wrappable`.
    """
    tensors = [*module.parameters(), *module.buffers()]
    for hub in {id(h): h for t in tensors if (h := hub_of(t)) is not None}.values():
        hub.release()
    check_wrappable(module)


class Parameters:
    """All parameters and buffers of one wrapped module.

    Args:
        module: the user's module; the classes of its parameters and buffers change in place.
        stream: where commands go.
        model: the model's number on the workers, which have the module as it is now.
    """

    def __init__(self, module: nn.Module, stream: Stream, model: int, seed: int = 0) -> None:
        claim(module)
        self.module, self.stream, self.model, self.seed = module, stream, model, seed
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those that step on the workers
        parameters = dict(module.named_parameters())
        old_grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        self.state = ModuleState(module, parameters)
        self.gradients = Gradients(stream, model, parameters, self._configure)
        self._hooks = [_take_over(self, name, p) for name, p in parameters.items()]
        self.parameters: dict[str, RemoteParameter] = parameters  # type: ignore[assignment]
        self.buffers: dict[str, RemoteBuffer] = {}
        for name, b in module.named_buffers():
            self._adopt_buffer(name, b)
        self._stale: set[str] = set()
        self._dirty: set[str] = set()
        self._lent: dict[str, Tensor] = {}  # memory that left torch: its content when it was last looked at
        self._looked: str | None = None
        self._released = False
        self._configuration = 0
        for name, grad in old_grads.items():
            self.gradients.set(name, grad)
        stream.on_drop.append(self.invalidate)

    def _adopt_buffer(self, name: str, buffer: Any) -> None:
        buffer.__class__ = RemoteBuffer
        buffer._place = (self, name)
        self.buffers[name] = buffer

    def key(self, name: str) -> str:
        """How the workers call a parameter where several models may meet."""
        return f"{self.model}:{name}"

    def _tensor(self, name: str) -> Any:
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    # ---- reading

    def look(self, name: str) -> None:
        """Somebody looks at the tensor `name`: bring it up to date. A second name brings all at once."""
        if self._released or (name not in self.parameters and name not in self.buffers):
            return  # a view of what is no longer ours
        with OFF():
            on_workers_only = self._tensor(name).is_meta
        if on_workers_only:
            raise UnsupportedError(
                f"'{name}' was initialised on the workers and has no copy here (it is on the meta device); read it by "
                "model.state_dict(), write it with model.change(fn)"
            )
        if name in self._stale:
            self.pull([name] if self._looked in (None, name) else None)
            self._looked = name

    def pull(self, names: Iterable[str] | None = None) -> None:
        """Bring the named tensors (None: all) up to date, where they are not. One message per worker, and waits."""
        with OFF():
            real = {n for n in self._stale if not self._tensor(n).is_meta}
        values = self.read(real if names is None else real.intersection(names))
        with OFF(), torch.inference_mode(False), torch.no_grad():
            for name, value in values.items():
                tensor = self._tensor(name)
                self._check_lent(name)
                T.copy_(tensor, value) if tensor.shape == value.shape else T.data.__set__(tensor, value.clone())
                self._stale.discard(name)
                if name in self._lent:
                    self._lent[name] = T.detach(tensor).clone()

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The workers' values of the named tensors (None: all); the driver's stay as they are.

        One message per worker, and waits.
        """
        wanted = None if names is None else set(names)
        order = tuple(n for n in (*self.parameters, *self.buffers) if wanted is None or n in wanted)
        if not order:
            return {}
        if any(n in self.buffers for n in order):
            self.stream.level(self.model)
        pending = self.stream.record(program.ReadTensors, model=self.model, names=order)
        wires = pending.wait("parameters and buffers")[0]
        return {name: from_wire(wire, writable=False) for name, wire in zip(order, wires, strict=True)}

    # ---- writing

    def wrote(self, name: str) -> None:
        """The tensor `name` was written to on the driver."""
        if not self._released and (name in self.parameters or name in self.buffers):
            self._dirty.add(name)

    def lend(self, name: str) -> None:
        """The memory of `name` is in hands that cannot be watched: compare it before each command."""
        if not self._released:
            self._lent[name] = T.detach(self._tensor(name)).clone()

    def check_assignment(self, tensor: Any, value: Any) -> None:
        """Before `p.data = value`: what would change the structure, or share memory unseen, raises."""
        if isinstance(tensor, RemoteView):
            raise UnsupportedError("assigning .data of a view of a remote parameter: write into it, view.copy_(value)")
        _, name = tensor._place
        if not isinstance(value, Tensor) or value.shape != tensor.shape or value.dtype != tensor.dtype:
            found = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise UnsupportedError(
                f"'{name}' has shape {tuple(tensor.shape)} and dtype {tensor.dtype} on the workers and cannot become "
                f"{found}; change the bare module and wrap it anew"
            )
        place = getattr(value, "_place", None)
        if place is not None and place != tensor._place:
            raise UnsupportedError(
                f"'{name}' would share memory with '{place[1]}' on the driver but not on the workers; copy the "
                "values (p.data.copy_(q)), or tie the parameters and wrap the module anew"
            )

    def _check_lent(self, name: str) -> None:
        if name not in self._lent:
            return
        with OFF():
            tensor = T.detach(self._tensor(name))
            if not _same_bits(tensor, self._lent[name]):
                if name in self._stale:
                    del self._lent[name]
                    raise UnsupportedError(
                        f"'{name}' was written to through a numpy array or storage taken before the last optimizer "
                        "step; read the parameter again and write into what it gives"
                    )
                self._dirty.add(name)
                self._lent[name] = tensor.clone()
            if not _is_shared(self._tensor(name)):
                del self._lent[name]

    def _push(self) -> None:
        """Send what was written."""
        for name in tuple(self._lent):
            self._check_lent(name)
        if not self._dirty:
            return
        names = tuple(n for n in (*self.parameters, *self.buffers) if n in self._dirty)
        group = self.stream.group
        with OFF():
            handles = tuple(group.put(to_wire(T.detach(self._tensor(n)))) for n in names)
        self.stream.record(program.Write, [handles] * group.size, model=self.model, names=names)
        self._dirty.clear()

    def _configure(self) -> None:
        """Send changed modes, attributes and flags."""
        found = self.state.difference()
        if found is None:
            return
        self._configuration += 1
        self._take_buffers(found)
        attributes = found.attributes
        try:
            dumps: Any = cloudpickle.dumps
            body = bytes(dumps(attributes)) if attributes else b""
        except Exception as error:
            names = ", ".join(".".join(filter(None, where)) for where in attributes)
            raise UnsupportedError(f"changed attributes ({names}) cannot travel to the workers: {error}") from error
        if found.modes or body or found.requires_grad:
            self.stream.record(
                program.Configure,
                model=self.model,
                modes=tuple(found.modes.items()),
                attributes=body,
                requires_grad=tuple(found.requires_grad.items()),
            )

    def _take_buffers(self, found: Difference) -> None:
        """Buffers that were replaced: the new tensor becomes the remote one."""
        for (module, key), new in found.buffers.items():
            name = f"{module}.{key}" if module else key
            old = self.buffers.pop(name, None)
            if old is not None:
                plain: Any = old
                plain.__class__ = Tensor
                del plain._place
            self._dirty.discard(name)
            self._stale.discard(name)
            self._lent.pop(name, None)
            if new is not None:
                self._adopt_buffer(name, new)
            if new is not None and old is not None and new.shape == old.shape and new.dtype == old.dtype:
                self._dirty.add(name)
            else:
                found.attributes[module, key] = new

    # ---- the seams: before a command is recorded, and after

    def before_call(self) -> int:
        """Before a call is recorded: send what the user changed. Costs no message, and tens of microseconds if nothing
        was changed.

        Returns: a number that rises with every change of modes, attributes and flags.

        Raises:
            UnsupportedError: the module's structure or hooks changed.
        """
        self._check_open()
        self.gradients.flush()
        self._configure()
        self._push()
        if self.buffers:
            self._stale.update(self.buffers)  # a training forward changes them
            self._looked = None
        return self._configuration

    def before_backward(self) -> None:
        """Before a backward that fills gradients is recorded: edited gradients travel first."""
        self._check_open()
        self.gradients.flush()

    def after_backward(self) -> None:
        """A backward was recorded: gradients changed, and more of them may be there."""
        self.gradients.after_backward()

    def before_step(self) -> None:
        """Before a step is recorded: written parameters and edited gradients travel first."""
        self._check_open()
        self.gradients.flush()
        self._push()

    def after_commit(self) -> None:
        """A command that changes parameters was recorded. Waits only while somebody holds a numpy array of one."""
        self._stale.update(self.parameters, self.buffers)
        self._stale -= self._dirty
        self._looked = None
        self.gradients.after_commit()
        held = [n for n in self._lent if _is_shared(self._tensor(n))]
        if held:
            self.pull(held)

    def invalidate(self, dropped: Sequence[program.Command] = ()) -> None:
        """Recorded commands were dropped after a failure: values and what was sent are unknown."""
        self._stale.update(self.parameters, self.buffers)
        self._stale -= self._dirty
        self._looked = None
        self.state.forget()
        self.gradients.invalidate()

    def zero_grad(self, names: Iterable[str] | None = None, set_to_none: bool = True) -> None:
        """Set the named gradients (None: all) to None, or to zeros where they are not None. Costs no message."""
        self._check_open()
        self.gradients.zero(self.parameters if names is None else names, set_to_none)

    def release(self) -> None:
        """Bring everything home and turn parameters and buffers into plain ones again, with plain gradients.

        Idempotent. Where the workers are gone, values are those of the last look, and a warning says so.
        """
        if self._released:
            return
        grads: dict[str, Tensor] = {}
        try:
            self.pull()
            grads = {n: g.fetch() if isinstance(g, RemoteGradient) else g for n, g in self._present_grads()}
        except TorchdlError as error:
            warnings.warn(f"the newest parameters are lost, the module keeps those last read: {error}", stacklevel=2)
        self._released = True
        if self.invalidate in self.stream.on_drop:
            self.stream.on_drop.remove(self.invalidate)
        for hook in self._hooks:
            if hook is not None:
                hook.remove()
        tensors: list[Any] = [*self.parameters.values(), *self.buffers.values()]
        for tensor in tensors:
            tensor.__class__ = nn.Parameter if isinstance(tensor, RemoteParameter) else Tensor
            del tensor._place
        for name, grad in grads.items():
            if not self.parameters[name].is_meta:
                self.parameters[name].grad = grad.to(self.parameters[name].device)

    def _present_grads(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.parameters:
            grad = self.gradients.get(name)
            if grad is not None:
                yield name, grad

    def _check_open(self) -> None:
        if self._released:
            raise ClosedError("the model was closed, or its module was wrapped again by a later DataParallel")


def _take_over(hub: Parameters, name: str, p: Any) -> Any:
    """Make `p` a remote parameter; what the driver's own autograd accumulates in it goes to the workers."""

    def accumulated(_: Tensor) -> None:
        with OFF():
            grad = T.grad.__get__(p)
            T.grad.__set__(p, None)
        hub.gradients.add_own(name, grad)

    p.grad = None
    hook = None
    if p.dtype.is_floating_point or p.dtype.is_complex:
        flag = p.requires_grad
        p.requires_grad_(True)  # torch takes no hook for a frozen one, which may be thawed later
        hook = p.register_post_accumulate_grad_hook(accumulated)
        p.requires_grad_(flag)
    p.__class__ = RemoteParameter
    p._place = (hub, name)
    return hook


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    return torch.equal(a, b)


def _is_shared(tensor: Any) -> bool:
    """Whether anything else holds the tensor's memory: an array, a storage, a view, a graph."""
    with OFF():
        storage = tensor.untyped_storage()
        return bool(torch._C._storage_Use_Count(storage._cdata) > 2)

"""Tensors on the driver whose truth lies on the workers: parameters, buffers, and views of them.

Runs on the driver; their hub (`Parameters` in remote_parameter.py) brings values and takes note of writes. What
crosses: nothing by itself; a look at a value may cost the hub one message per worker.

Every torch function that meets such a tensor comes here first: functions that look at shape or dtype pass; all others
get the newest values; what they wrote is found by the version counters; results on the same memory become
`RemoteView`s, so that they read and write as the parameter does. Memory that leaves torch (numpy arrays, storages) is
reported as lent.

Invariant: reading gives the newest value, and no write goes unseen, or it raises.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from .errors import UnsupportedError
from .gradients import OFF, Gradients
from .operations import METADATA, SHAPE_ONLY, Function, tensors_in

T: Any = Tensor
_HIDDEN_WRITES = ("batch_norm", "instance_norm")  # write running statistics without counting a version
_GRADIENT_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_ENGINE = (torch.autograd.grad, torch.autograd.backward)
_ZEROING = tuple(inspect.unwrap(f).__code__ for f in (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad))
_QUIET = frozenset((T.backward, T.retain_grad, T.__deepcopy__))


class Hub(Protocol):
    """Who keeps the tensors of one model up to date."""

    gradients: Gradients

    def look(self, name: str) -> None:
        """Somebody looks at the tensor `name`: bring it up to date."""

    def wrote(self, name: str) -> None:
        """The tensor `name` was written to on the driver."""

    def lend(self, name: str) -> None:
        """The memory of `name` is in hands that cannot be watched."""

    def check_assignment(self, tensor: Any, value: Any) -> None:
        """Before `p.data = value`: raise for what would change the structure, or share memory unseen."""


class Remote:
    """What parameters, buffers and their views have in common: `_place` is the hub and the name."""

    is_remote_parameter = False
    _place: tuple[Hub, str]

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or func in SHAPE_ONLY:
            with OFF():
                return func(*args, **kwargs)
        if not all(t in _KNOWN or issubclass(t, Remote) for t in types):
            return NotImplemented  # handles and outputs know how to meet us
        _refuse(func, args, kwargs)
        with OFF():
            return _watched_call(func, args, kwargs)

    def __format__(self, spec: str) -> str:
        return format(_current(self), spec)


class RemoteParameter(Remote, nn.Parameter):
    """A parameter of a wrapped module: reads as its newest value, and what is written to it travels."""

    is_remote_parameter = True

    @property
    def grad(self) -> Tensor | None:
        """The gradient: None, or a handle whose values stay on the workers until they are read."""
        hub, name = self._place
        caller = sys._getframe(1)
        if caller.f_code in _ZEROING and caller.f_locals.get("set_to_none", True):
            return hub.gradients.if_any(name)
        return hub.gradients.get(name)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        hub, name = self._place
        hub.gradients.set(name, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return "Parameter containing:\n" + repr(_current(self).requires_grad_(_flag(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(_current(self).detach().clone(), _flag(self))
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch._utils._rebuild_parameter, (_current(self).detach(), _flag(self), OrderedDict())


class RemoteBuffer(Remote, torch.Tensor):
    """A buffer of a wrapped module."""

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(_current(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _copied(self)
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = _current(self)
        return plain.__reduce_ex__(protocol)


class RemoteView(Remote, torch.Tensor):
    """A tensor on the memory of a parameter or buffer."""

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(_current(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(_current(self), memo)
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = _current(self)
        return plain.__reduce_ex__(protocol)


_KNOWN = frozenset((Tensor, nn.Parameter, nn.Buffer))


# ---- torch functions on remote tensors


def _refuse(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = getattr(func, "__name__", "")
    if name in _GRADIENT_HOOKS and isinstance(args[0], RemoteParameter):
        raise UnsupportedError(
            f"{name} on a parameter whose gradient arises on the workers: change p.grad between backward and step "
            "instead (p.grad.mul_(0.5), p.grad.clamp_(-1, 1), which run there)"
        )
    inputs = kwargs.get("inputs") if func is not torch.autograd.grad else (args[1:], kwargs)
    if (func in _ENGINE or func is T.backward) and any(isinstance(t, RemoteParameter) for t in _flat(inputs)):
        raise UnsupportedError(
            "gradients with respect to parameters that live on the workers arrive in their .grad by loss.backward(); "
            "for torch.autograd.grad and inputs=[...] compute them there, with model.run(fn)"
        )
    if name in ("__dlpack__", "share_memory_"):
        raise UnsupportedError(
            f"{name} would lend memory whose use cannot be seen; lend p.detach().clone(), and write it back by copy_"
        )


def _flat(tree: Any) -> list[Tensor]:
    if isinstance(tree, dict) and type(tree) is not dict:
        tree = dict(tree)
    return tensors_in(tree if not isinstance(tree, Iterable) or isinstance(tree, Tensor | str) else _listed(tree))


def _listed(tree: Any) -> Any:
    return tree if type(tree) in (list, tuple, dict) else list(tree)


def _watched_call(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call on the newest values; note what was written, and watch what shares memory."""
    remotes: list[Any] = [t for t in tensors_in((args, kwargs)) if isinstance(t, Remote)]
    if func in _ENGINE or func in _QUIET:
        return func(*args, **kwargs)
    for t in remotes:
        hub, name = t._place
        hub.look(name)
    name = getattr(func, "__name__", "")
    versions = [t._version for t in remotes]
    hidden = [t.detach().clone() for t in remotes] if name.endswith(_HIDDEN_WRITES) else []
    is_assignment = func == T.data.__set__
    if is_assignment:
        remotes[0]._place[0].check_assignment(remotes[0], args[1])
    result = func(*args, **kwargs)
    for k, t in enumerate(remotes):
        hub, place = t._place
        if t._version != versions[k] or (hidden and not torch.equal(hidden[k], t)):
            hub.wrote(place)
    if is_assignment:
        if isinstance(remotes[0], RemoteView):
            return result
        hub, place = remotes[0]._place
        hub.wrote(place)
        hub.lend(place)
        return result
    return _adopted(result, remotes)


def _adopted(result: Any, remotes: Sequence[Any]) -> Any:
    """Make views of what shares memory with a remote tensor, and watch memory that leaves torch."""
    if isinstance(result, Tensor):
        if type(result) is Tensor and result.layout is torch.strided:
            storage = result.untyped_storage()._cdata
            for t in remotes:
                if t.untyped_storage()._cdata == storage:
                    view: Any = result
                    view.__class__ = RemoteView
                    view._place = t._place
                    break
    elif isinstance(result, list | tuple):
        for item in result:
            _adopted(item, remotes)
    elif isinstance(result, np.ndarray | torch.UntypedStorage | torch.TypedStorage):
        for t in remotes:
            hub, name = t._place
            hub.lend(name)
    return result


def _current(tensor: Any) -> Tensor:
    """A plain tensor on the same memory, up to date."""
    hub, name = tensor._place
    hub.look(name)
    with OFF():
        plain: Tensor = T.data.__get__(tensor)
        return plain


def _copied(tensor: Any) -> Tensor:
    return _current(tensor).clone()


def _flag(tensor: Any) -> bool:
    with OFF():
        return bool(tensor.requires_grad)

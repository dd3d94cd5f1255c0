"""Stock optimizers, adopted to run on the workers.

Runs on the driver. Importing this module installs one global step hook of torch. For an optimizer over remote
parameters that hook only installs ours as the optimizer's own last one, because global hooks run before the user's and
fire twice for `super().step()`. Ours records `Step`, and lets the stock `step` run on a stand-in that holds only the
driver's own parameters, so that return values, counters, schedulers and wrappers behave. What crosses: see
remote_optimizer.py; a step without changed hyperparameters sends nothing of its own.

These steps run on the driver, on gradients and parameters that are fetched and written back, which is exact but slower:
steps of an optimizer that holds another one (Lookahead, SAM; the inner one runs on the workers), and steps with a
closure unless the class is torch's own and calls it just once.

Invariant: an exception at any point of a step leaves the optimizer usable; nothing is kept between two steps that only
the end of the first would take back.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from .adoption import APART, HOOK_NAMES
from .entries import PACKAGE, TORCH
from .errors import ClosedError, TorchdlError, UnsupportedError
from .remote_optimizer import Membership, RemoteOptimizer, RemoteState
from .remote_parameter import Parameters, hub_of
from .stand_in import StandIn, fetch_handles, idle, runs_empty

STEP_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__
WHAT = "the optimizer's state"


def is_remote(optimizer: Optimizer) -> bool:
    """Whether the optimizer holds a remote parameter."""
    return any(hub_of(p) is not None for group in optimizer.param_groups for p in group["params"])


def release_optimizers(hub: Parameters) -> None:
    """Bring home the state of all optimizers over the parameters of `hub` and make them ordinary again.

    To be called before the workers go. Costs one message and wait per optimizer.
    """
    for optimizer in list(hub.optimizers):
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            if not isinstance(hook, Adopted) or all(hub not in remote.hubs for remote in hook.remotes):
                continue
            try:
                hook.release(optimizer)
            except TorchdlError as error:
                _warn(f"the newest state of {type(optimizer).__name__} is lost: {error}")
    hub.optimizers.clear()


def install() -> None:
    """Register torch's global hook, once per process."""
    if all(hook is not before_step for hook in _global_optimizer_pre_hooks.values()):
        register_optimizer_step_pre_hook(before_step)


def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Torch's global hook before each step: makes ours the optimizer's own last one."""
    if not is_remote(optimizer):
        return
    _refuse_scaler()
    hooks = optimizer._optimizer_step_pre_hooks
    ours = next((key for key, hook in reversed(hooks.items()) if isinstance(hook, Adopted)), None)
    if ours is None:
        adopted = Adopted()
        ours = optimizer.register_step_pre_hook(adopted).id
        after = optimizer.register_step_post_hook(adopted.finish).id
        optimizer._optimizer_step_post_hooks.move_to_end(after, last=False)  # type: ignore[attr-defined]
        optimizer.register_state_dict_pre_hook(adopted.before_state_dict, prepend=True)
    hooks.move_to_end(ours)  # type: ignore[attr-defined]


class Adopted:
    """An optimizer over remote parameters: its last own hook before a step, and its counterparts on the workers."""

    def __init__(self) -> None:
        self.remotes: list[RemoteOptimizer] = []  # one per stream
        self._state: Callable[[], RemoteState | None] = _nobody  # as long as it is `optimizer.state`
        self._optimizer: Callable[[], Optimizer | None] = _nobody
        self._members: Membership | None = None
        self._own: collections.defaultdict[Any, Any] = collections.defaultdict(dict)  # the stand-in's state
        self._backup: dict[Any, Any] | None = None  # what was shipped, until the workers have it
        self._stand: StandIn | None = None
        self._idle: Optimizer | None = None  # for torch's own classes without parameters of the driver
        self._needs_filling = False
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Adopted, ()  # a copy of the optimizer starts anew

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Record the step; returns arguments that make the stock step run on a stand-in."""
        if not is_remote(optimizer) or self._runs_on_driver(optimizer, args, kwargs):
            return None
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise UnsupportedError(
                f"{type(optimizer).__name__}(differentiable=True): no graph leads through a step on the workers. Step "
                "with differentiable=False, or differentiate through the update inside model.run(fn)"
            )
        args, kwargs = _call_closure(args, kwargs)
        members = self._members
        if members is None or not members.is_current(optimizer):
            members = self._members = Membership(optimizer)
        for hub in members.hubs:
            hub.before_step()
        self._adopt(optimizer, members)
        for remote in self.remotes:
            remote.step(optimizer, members, members.hubs[0].seed)
            for hub in remote.hubs:
                hub.after_commit()
        for remote in self.remotes:
            remote.stream.step_boundary()
        if type(optimizer).__module__.startswith("torch.optim.") and not any(members.own):
            if type(self._idle) is not type(optimizer):
                self._idle = idle(optimizer)
            return (self._idle, *args[1:]), kwargs
        self._stand = StandIn(optimizer, members.own, self._own, self._needs_filling)
        return (self._stand.optimizer, *args[1:]), kwargs

    def finish(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After the stock step: note on the driver's object what it changed on the stand-in."""
        stand, self._stand = self._stand, None
        if stand is None or args[0] is not stand.optimizer:
            if args[0] is optimizer and is_remote(optimizer):
                fetch_handles(optimizer)
            return
        attributes, groups, others = stand.changes(optimizer)
        for remote in self.remotes:
            remote.trust(attributes, groups)
            others += remote.altered(stand.containers())
        for remote in self.remotes if others else ():
            remote.read(optimizer, "attributes that the optimizer's step changed", state=False, names=others)

    def before_state_dict(self, optimizer: Optimizer) -> None:
        """Bring home the state, and with it what `state_dict` reads before: the groups."""
        state = self._state()
        if state is not None and optimizer.state is state:
            state.bring_home()

    def release(self, optimizer: Optimizer) -> None:
        """Make the optimizer an ordinary one again, its state at home. Raises where the state is lost."""
        state = self._state()
        if state is not None and optimizer.state is state:
            optimizer.state = state.plain()
        for name in HOOK_NAMES:
            hooks = optimizer.__dict__[name]
            for key, hook in list(hooks.items()):
                if hook is self or getattr(hook, "__self__", None) is self:
                    del hooks[key]
        self.remotes, self._backup = [], None

    # ---- adoption

    def fetch(self) -> dict[Any, Any]:
        """The whole state: the workers' part and the driver's own."""
        optimizer = self._optimizer()
        found: dict[Any, Any] = {}
        for remote in self.remotes:
            if remote.is_there is False:
                kept = (self._backup or {}).items()
                found.update({k: v for k, v in kept if not isinstance(k, Tensor) or remote.name_of(k)})
            else:
                found.update(remote.read(optimizer, WHAT))
        for key, value in self._own.items():
            if isinstance(key, Tensor) and all(remote.name_of(key) is None for remote in self.remotes):
                found[key] = value
        return found

    def _adopt(self, optimizer: Optimizer, members: Membership) -> None:
        """Make sure that the workers have the optimizer as it is here."""
        by_stream: dict[int, list[Parameters]] = {}
        for hub in members.hubs:
            by_stream.setdefault(id(hub.stream), []).append(hub)
        current = [list(r.hubs) for r in self.remotes] == list(by_stream.values())
        if all(remote.is_there for remote in self.remotes):
            self._backup = None
        state = optimizer.state
        if isinstance(state, RemoteState) and state is self._state():
            if current and not state.changed() and not any(r.needs_adoption(optimizer) for r in self.remotes):
                state.send_away()
                return
            content = dict(state.plain())
        else:
            for remote in self.remotes:
                if remote.is_there is not False:  # the state was replaced, the attributes were not
                    with contextlib.suppress(ClosedError):
                        remote.read(optimizer, WHAT, state=False)
            content = dict(state.items())
        if not current:
            self.remotes = [RemoteOptimizer(hubs[0].stream, hubs) for hubs in by_stream.values()]
        self._optimizer = weakref.ref(optimizer)
        self._own = collections.defaultdict(dict)
        for key, value in content.items():
            if not isinstance(key, Tensor):
                self._own[key] = copy.deepcopy(value)
            elif hub_of(key) is None:
                self._own[key] = value
        self._needs_filling = not _runs_stock_step(type(optimizer)) and not runs_empty(optimizer, self._own)
        self._backup = content
        for remote in self.remotes:
            remote.adopt(optimizer, members, content)
        if not isinstance(state, RemoteState) or state is not self._state():
            state = RemoteState(self.fetch)
            self._state = weakref.ref(state)
            optimizer.state = state
        state.send_away()
        for hub in members.hubs:
            hub.optimizers.add(optimizer)

    # ---- steps on the driver

    def _runs_on_driver(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        stock = _runs_stock_step(type(optimizer))
        if closure is not None and (not stock or isinstance(optimizer, LBFGS)):
            reason = "its step has a closure"
        elif any(o is not optimizer and is_remote(o) for o in _inner_optimizers(optimizer)):
            reason = "it holds another optimizer, which runs on the workers"
        else:
            return not stock and _is_nested(optimizer)
        name = type(optimizer).__name__
        if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
            raise UnsupportedError(
                f"{name}.step would run on the driver, because {reason}; but the driver has no copy of this model, "
                "which was built on the meta device. Use an optimizer whose step() runs without a closure, or build "
                "the model with data."
            )
        if not self._warned:
            self._warned = True
            _warn(
                f"{name}.step runs on the driver, because {reason}: it fetches the gradients and parameters that it "
                "reads and writes back what it changes, which is exact but slower."
            )
        self.before_state_dict(optimizer)
        return True


def _nobody() -> None:
    return None


def _runs_stock_step(cls: type[Optimizer]) -> bool:
    """Whether `step` is torch's own."""
    owner = next((c for c in cls.__mro__ if "step" in c.__dict__), cls)
    return owner.__module__.startswith("torch.optim.")


def _inner_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    for name, value in optimizer.__dict__.items():
        if isinstance(value, Optimizer):
            yield value
        elif name not in APART and isinstance(value, list | tuple | dict):
            yield from (v for v in (value.values() if isinstance(value, dict) else value) if isinstance(v, Optimizer))


def _call_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Torch's own steps call the closure once, before all else: do that now, and pass its result on."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss), {k: v for k, v in kwargs.items() if k != "closure"}


def _steps_above(limit: int = 10_000) -> Iterator[types.FrameType]:
    """The frames of running steps, the innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and limit:
        if frame.f_code is STEP_WRAPPER:
            yield frame
        frame, limit = frame.f_back, limit - 1


def _is_nested(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer runs already, on the driver, and has called `super().step()`."""
    return sum(frame.f_locals.get("self") is optimizer for frame in _steps_above()) > 1


def _refuse_scaler() -> None:
    step = next(_steps_above(), None)
    frame = step.f_back if step is not None else None
    for _ in range(4):
        if frame is None:
            return
        if frame.f_code.co_filename == grad_scaler.__file__:
            raise UnsupportedError(
                "torch.amp.GradScaler stepped an optimizer whose parameters are on the workers, where it cannot skip a "
                "step. Drop the scaler: autocast around the call in torch.bfloat16 needs none, and float32 works."
            )
        frame = frame.f_back


def _warn(text: str) -> None:
    """Warn at the user's line."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith((PACKAGE, TORCH, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level + 1)


install()

"""What a module is apart from the values of its tensors: modes, attributes, flags, which buffers, structure, hooks.

Runs on the driver. A `ModuleState` remembers what the workers have; `difference` says what the user changed since. What
crosses: what differs, as one `Configure`.

Invariant: a change is found and either travels or raises before the next call. Watched are all attributes of all
modules; inside them tensors, plain containers, and objects that pickle to at most `MAX_OBJECT_BYTES`.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .errors import UnsupportedError

MAX_OBJECT_BYTES = 1 << 16  # of an attribute that is no number, string, tensor or plain container
MAX_ITEMS = 10_000  # of a plain container
ANEW = "wrap the module anew: model = DataParallel(module, ...)"

_INTERNAL = frozenset(nn.Module().__dict__)
_TABLES = tuple(k for k, v in nn.Module().__dict__.items() if isinstance(v, dict))  # parameters, modules, hooks, ...
_HOOKS = tuple(k for k in _TABLES if k not in ("_parameters", "_buffers", "_modules"))
_ATOMS = (
    *(int, float, complex, str, bytes, type(None), type, Enum, nn.Module),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
_CONTAINERS = (list, tuple, dict, set, frozenset)


def check_wrappable(module: nn.Module) -> None:
    """Refuse by name what cannot live on the workers.

    Raises:
        UnsupportedError: uninitialised lazy modules, subclasses of nn.Parameter, gradient hooks on parameters, tensors
            made in inference mode, buffers of another class than torch.Tensor.
    """
    for name, p in module.named_parameters():
        if is_lazy(p):
            raise UnsupportedError(
                f"parameter '{name}' is not initialised (a lazy module); run the module on a sample batch, then wrap it"
            )
        if type(p) is not nn.Parameter:
            raise UnsupportedError(
                f"parameter '{name}' is a {type(p).__name__}; parameters of subclasses cannot be kept equal on the "
                "workers. Use plain nn.Parameter"
            )
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"parameter '{name}' has a gradient hook, which would run on one worker's part of the gradient; remove "
                "it and change p.grad between backward and step instead"
            )
        _refuse_inference("parameter", name, p)
    for name, b in module.named_buffers():
        if type(b) is not Tensor:
            raise UnsupportedError(
                f"buffer '{name}' is a {type(b).__name__}, which cannot be kept equal on the workers; use torch.Tensor"
            )
        _refuse_inference("buffer", name, b)


def _refuse_inference(what: str, name: str, tensor: Tensor) -> None:
    if tensor.is_inference():
        raise UnsupportedError(
            f"{what} '{name}' was made in inference mode, where writes to it cannot be seen; build the module outside"
        )


@dataclass(slots=True)
class Difference:
    """What changed since the workers were told: `buffers` are those that were replaced by another tensor."""

    modes: dict[str, bool] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    buffers: dict[tuple[str, str], Tensor | None] = field(default_factory=dict)


class ModuleState:
    """What the workers know of a module, apart from values.

    Args:
        module: as it was shipped.
        parameters: its parameters by name, each once.
    """

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self.module = module
        self._parameters = parameters
        self._told: dict[tuple[str, str], Any] = {}  # attributes that were changed ever
        self._void = False
        self._take()

    def forget(self) -> None:
        """The workers may have missed anything that was told since the beginning: tell it again."""
        self._void = True

    def difference(self) -> Difference | None:
        """What the user changed since the last time, None for nothing; the next difference starts from here.

        Raises:
            UnsupportedError: a submodule, parameter, hook or method was added, removed or replaced.
        """
        if not self._void and self._is_same():
            return None
        found = self._compare()
        self._take()
        return found

    # ---- the quick look

    def _take(self) -> None:
        named = dict(self.module.named_modules())
        self._modules = named
        self._attributes = {name: dict(m.__dict__) for name, m in named.items()}
        self._dicts = [m.__dict__ for m in named.values()]
        self._flat = self._values()
        self._sizes = list(map(len, self._dicts))
        tables = [m.__dict__[key] for m in named.values() for key in _TABLES]
        self._empty = [t for t in tables if not t]
        self._full = [t for t in tables if t]
        self._entries = self._table_entries()
        self._held = [tuple(t.values()) for t in self._full]  # so that no identity is used twice
        self._tables = {
            (name, key): dict(m.__dict__[key]) for name, m in named.items() for key in _TABLES if m.__dict__[key]
        }
        self._flags = self._requires_grad()
        self._watched = _watch(
            value for m in named.values() for key, value in m.__dict__.items() if key not in _INTERNAL
        )

    def _values(self) -> list[Any]:
        return list(itertools.chain.from_iterable(map(dict.values, self._dicts)))

    def _table_entries(self) -> list[tuple[int, ...]]:
        return [tuple(map(id, t.values())) for t in self._full]

    def _requires_grad(self) -> list[bool]:
        with torch._C.DisableTorchFunctionSubclass():
            return [p.requires_grad for p in self._parameters.values()]

    def _is_same(self) -> bool:
        """Tens of microseconds for tens of modules."""
        try:
            if self._values() != self._flat:  # compares by identity first
                return False
        except Exception:  # an attribute whose comparison is no bool
            return False
        if any(self._empty) or list(map(len, self._dicts)) != self._sizes or self._table_entries() != self._entries:
            return False
        if self._requires_grad() != self._flags:
            return False
        return all(is_same() for _, is_same in self._watched)

    # ---- the long one

    def _compare(self) -> Difference:
        modules = dict(self.module.named_modules())
        self._check_structure(modules)
        found = Difference()
        mutated = {id(value) for value, is_same in self._watched if not is_same()}
        for name, module in modules.items():
            old = self._attributes[name]
            if self._void or module.training != old["training"]:
                found.modes[name] = module.training
            for key in old.keys() - module.__dict__.keys():
                raise UnsupportedError(f"attribute '{_path(name, key)}' was deleted; {ANEW}")
            for key, value in module.__dict__.items():
                if key in _INTERNAL or (key in old and _equal(value, old[key]) and id(value) not in mutated):
                    continue
                if _may_travel(name, key, value):
                    found.attributes[name, key] = self._told[name, key] = value
            found.buffers |= self._replaced_buffers(name, module)
        if self._void:
            found.attributes = {**self._told, **found.attributes}
            self._void = False
            old_flags: Iterable[bool | None] = [None] * len(self._flags)
        else:
            old_flags = self._flags
        for (name, was), now in zip(zip(self._parameters, old_flags, strict=True), self._requires_grad(), strict=True):
            if was != now:
                found.requires_grad[name] = now
        return found

    def _check_structure(self, modules: dict[str, nn.Module]) -> None:
        for name in modules.keys() ^ self._modules.keys():
            raise UnsupportedError(f"submodule '{name}' was {'added' if name in modules else 'removed'}; {ANEW}")
        for name, module in modules.items():
            if module is not self._modules[name]:
                raise UnsupportedError(f"submodule '{name}' was replaced by another {type(module).__name__}; {ANEW}")
            for key in ("_parameters", "_modules", "_buffers"):
                old, new = self._tables.get((name, key), {}), getattr(module, key)
                for entry in old.keys() ^ new.keys():
                    what = "added" if entry in new else "removed"
                    raise UnsupportedError(f"{_KINDS[key]} '{_path(name, entry)}' was {what}; {ANEW}")
                for entry, value in new.items():
                    if value is not old[entry] and key != "_buffers":
                        raise UnsupportedError(
                            f"{_KINDS[key]} '{_path(name, entry)}' was replaced by another object; write into the one "
                            f"there is (with torch.no_grad(): p.copy_(value)), or {ANEW}"
                        )
            for key in _HOOKS:
                old = self._tables.get((name, key), {})
                if list(map(id, old.values())) != list(map(id, getattr(module, key).values())):
                    raise UnsupportedError(
                        f"a hook of module '{name or type(module).__name__}' was added or removed ({key.strip('_')}), "
                        f"and hooks run on the workers; {ANEW}"
                    )

    def _replaced_buffers(self, name: str, module: nn.Module) -> dict[tuple[str, str], Tensor | None]:
        old = self._tables.get((name, "_buffers"), {})
        return {(name, key): b for key, b in module._buffers.items() if b is not old[key]}


_KINDS = {"_parameters": "parameter", "_modules": "submodule", "_buffers": "buffer"}


def _path(module: str, entry: str) -> str:
    return f"{module}.{entry}" if module else entry


def _may_travel(module: str, key: str, value: Any) -> bool:
    """False for what a forward on the driver left behind; raises for what belongs to the structure."""
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return value.grad_fn is None
    if callable(value):
        raise UnsupportedError(f"'{_path(module, key)}' was set to the callable {value!r:.80}; {ANEW}")
    return True


def _equal(new: Any, old: Any) -> bool:
    if new is old:
        return True
    if type(new) is not type(old):
        return False
    if isinstance(new, Tensor):
        return new.shape == old.shape and new.dtype == old.dtype and torch.equal(new, old)
    try:
        return bool(new == old)
    except Exception:  # no comparison: treat it as changed
        return False


def _watch(values: Iterable[Any]) -> list[tuple[Any, Callable[[], bool]]]:
    """Objects that may change inside, each once, with a function that tells whether it is still the same."""
    found: dict[int, tuple[Any, Callable[[], bool]]] = {}
    for value in values:
        if isinstance(value, _ATOMS) or id(value) in found:
            continue
        is_same = _watch_one(value)
        if is_same is not None:
            found[id(value)] = (value, is_same)
    return list(found.values())


def _watch_one(value: Any) -> Callable[[], bool] | None:
    if isinstance(value, Tensor):
        if isinstance(value, nn.Parameter) or value.is_inference():
            return None
        with torch._C.DisableTorchFunctionSubclass():
            version = value._version
        return lambda: bool(value._version == version)
    if isinstance(value, _CONTAINERS):
        if isinstance(value, tuple | frozenset) and all(isinstance(x, _ATOMS) for x in value):
            return None
        if not _is_plain(value, [MAX_ITEMS]):
            return None
        kept = copy.deepcopy(value)
        return lambda: bool(value == kept)
    try:
        body = pickle.dumps(value)
    except Exception:  # it cannot travel either
        return None
    if len(body) > MAX_OBJECT_BYTES:
        return None
    return lambda: pickle.dumps(value) == body


def _is_plain(value: Any, left: list[int]) -> bool:
    """Whether a container holds nothing but numbers, strings and such containers, at most `left[0]` of them."""
    left[0] -= 1
    if left[0] < 0 or isinstance(value, nn.Module):
        return False
    if isinstance(value, dict):
        return all(_is_plain(k, left) and _is_plain(v, left) for k, v in value.items())
    if isinstance(value, _CONTAINERS):
        return all(_is_plain(item, left) for item in value)
    return isinstance(value, _ATOMS)

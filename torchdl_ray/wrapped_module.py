"""`WrappedModule`: the wrapped module as seen through its wrapper: names without a prefix, modes, state.

Runs on the driver. What crosses: values when state is read (one message per worker), nothing otherwise; what is loaded
or set travels with the next command.

Invariant: the wrapper shows the module's own names, and never parameters that the workers do not hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from . import view
from .errors import UnsupportedError
from .remote_parameter import Parameters
from .stream import Stream


class WrappedModule(nn.Module):
    """What is torch's of a `DataParallel`: it behaves as the module that it wraps."""

    _core: nn.Module
    _stream: Stream
    _model: int
    _parameters_hub: Parameters
    _finalizer: weakref.finalize[..., Any]

    @property
    def module(self) -> nn.Module:
        """The wrapped module, up to date: its parameters bring their newest values when they are read."""
        self._refresh()
        return self._core

    wrapped_module = module

    def _refresh(self) -> None:
        if self._finalizer.alive:
            self._stream.level(self._model)
            self._parameters_hub.pull()

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        """The wrapped module's modules, under their own names: there is no `module.` prefix anywhere."""
        yield from self._core.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The wrapped module's children."""
        return self._core.named_children()

    def get_submodule(self, target: str) -> nn.Module:
        """The wrapped module's, as in named_modules."""
        return self._core.get_submodule(target)

    def train(self, mode: bool = True) -> Self:
        """Set the module's mode, here and with the next call on the workers."""
        self.training = mode
        self._core.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state with bare keys: copies on the CPU. One message per worker, waits for all steps."""
        self._refresh()
        state = self._core.state_dict(*args, **{**kwargs, "keep_vars": True})
        if any(isinstance(v, Tensor) and v.is_meta for v in state.values()):
            state.update(view.by_every_name(self._core, self._parameters_hub.read()))
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.detach().to("cpu", copy=True)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the bare module's state; it travels to the workers with the next command."""
        if assign:
            raise UnsupportedError(
                "assign=True would replace the parameters that the workers hold; load with assign=False"
            )
        return self._core.load_state_dict(state_dict, strict)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *told: Any) -> None:
        """What a module that holds this one calls; `told` are lists of missing and unexpected keys and of errors."""
        own = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        try:
            found = self.load_state_dict(own, False, metadata.get("assign_to_params_buffers", False))
            told[0].extend(prefix + key for key in found.missing_keys)
            told[1].extend(prefix + key for key in found.unexpected_keys)
        except RuntimeError as error:
            told[2].append(str(error))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Does nothing for a device: each worker keeps the module on its own. Raises UnsupportedError for a dtype."""
        parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
        wanted = [x for x in (parsed[1], parsed[3]) if x is not None]
        if wanted:
            raise UnsupportedError(
                f"the module is on the workers already; cast it before wrapping: DataParallel(module.to({wanted[0]}))"
            )
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        raise UnsupportedError(
            "the module is on the workers already: they choose their devices (use_gpu), and a dtype is set before "
            "wrapping, DataParallel(module.double())"
        )

"""What a module is apart from values: every change is found, travels or raises, and looking is cheap."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdl_ray.data_parallel import DataParallel
from torchdl_ray.errors import UnsupportedError
from torchdl_ray.module_state import Difference, ModuleState, check_wrappable


@dataclass
class Config:
    rate: float = 0.5


class Opaque:
    """An object without a comparison of its own."""

    def __init__(self) -> None:
        self.value = 1


class Sample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.BatchNorm1d(2))
        self.config = Config()
        self.opaque = Opaque()
        self.names = ["a", "b"]
        self.nested = {"x": [1, 2]}
        self.scale = torch.ones(2)
        self.label = "one"
        self.absent: Tensor | None = None
        self.register_buffer("none", None)
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.sum()
        return self.body(x)


def state_of(module: nn.Module) -> ModuleState:
    return ModuleState(module, dict(module.named_parameters()))


CHANGES: dict[str, tuple[Callable[[Sample], Any], Difference]] = {
    "eval": (lambda m: m.eval(), Difference(modes=dict.fromkeys(["", "body", "body.0", "body.1", "body.2"], False))),
    "mode of one": (lambda m: m.body[1].eval(), Difference(modes={"body.1": False})),
    "dropout.p": (lambda m: setattr(m.body[1], "p", 0.3), Difference(attributes={("body.1", "p"): 0.3})),
    "momentum": (lambda m: setattr(m.body[2], "momentum", None), Difference(attributes={("body.2", "momentum"): None})),
    "string": (lambda m: setattr(m, "label", "two"), Difference(attributes={("", "label"): "two"})),
    "new attribute": (lambda m: setattr(m, "extra", 3), Difference(attributes={("", "extra"): 3})),
    "append": (lambda m: m.names.append("c"), Difference(attributes={("", "names"): ["a", "b", "c"]})),
    "nested": (lambda m: m.nested["x"].append(3), Difference(attributes={("", "nested"): {"x": [1, 2, 3]}})),
    "dataclass": (lambda m: setattr(m.config, "rate", 0.1), Difference(attributes={("", "config"): Config(0.1)})),
    "freeze": (
        lambda m: m.body[0].requires_grad_(False),
        Difference(requires_grad={"body.0.weight": False, "body.0.bias": False}),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_once(name: str):
    change, expected = CHANGES[name]
    module = Sample()
    state = state_of(module)
    assert state.difference() is None
    change(module)
    assert state.difference() == expected
    assert state.difference() is None


def test_changes_inside_objects_and_tensors_are_found():
    module = Sample()
    state = state_of(module)
    module.opaque.value = 2
    module.scale.mul_(2)
    found = state.difference()
    assert found.attributes == {("", "opaque"): module.opaque, ("", "scale"): module.scale}
    assert state.difference() is None


def test_equal_values_are_no_change():
    module = Sample()
    state = state_of(module)
    module.label = "".join(["o", "ne"])
    module.names = ["a", "b"]
    module.scale = torch.ones(2)
    module.train()
    found = state.difference()
    assert found is None or found == Difference()


def test_replaced_buffers_are_found():
    module = Sample()
    state = state_of(module)
    module.mask = torch.zeros(2)
    module.none = torch.zeros(3)
    module.body[2].running_mean = torch.zeros(2)
    found = state.difference()
    assert set(found.buffers) == {("", "mask"), ("", "none"), ("body.2", "running_mean")}
    assert not found.attributes


def test_what_a_forward_leaves_behind_is_no_setting():
    module = Sample()
    state = state_of(module)
    module(torch.ones(3, 2, requires_grad=True))
    found = state.difference()
    assert not found.attributes


def test_after_a_failure_everything_is_told_again():
    module = Sample()
    state = state_of(module)
    module.body[1].p = 0.3
    module.body[2].eval()
    state.difference()
    state.forget()
    found = state.difference()
    assert found.attributes == {("body.1", "p"): 0.3}
    assert found.modes["body.2"] is False
    assert len(found.modes) == 5
    assert len(found.requires_grad) == 4
    assert state.difference() is None


STRUCTURE: dict[str, tuple[Callable[[Sample], Any], str]] = {
    "submodule added": (lambda m: m.body.append(nn.ReLU()), "'body.3' was added"),
    "submodule removed": (lambda m: delattr(m, "body"), "'body.*' was removed"),
    "submodule replaced": (lambda m: m.body.__setitem__(1, nn.Dropout(0.1)), "'body.1' was replaced"),
    "parameter replaced": (
        lambda m: setattr(m.body[0], "weight", nn.Parameter(torch.ones(2, 2))),
        "'body.0.weight' was repl",
    ),
    "parameter added": (lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))), "'more' was added"),
    "parameter removed": (lambda m: m.body[0].register_parameter("bias", None), "'body.0.bias' was replaced"),
    "buffer added": (lambda m: m.register_buffer("more", torch.ones(1)), "'more' was added"),
    "buffer removed": (lambda m: delattr(m, "mask"), "'mask' was removed"),
    "forward hook": (lambda m: m.body[1].register_forward_hook(lambda *a: None), "hook of module 'body.1'"),
    "pre-hook": (lambda m: m.register_forward_pre_hook(lambda *a: None), "hook of module 'Sample'"),
    "backward hook": (lambda m: m.body[0].register_full_backward_hook(lambda *a: None), "hook of module 'body.0'"),
    "method": (lambda m: setattr(m, "forward", lambda x: x), "'forward' was set to the callable"),
    "attribute deleted": (lambda m: delattr(m, "label"), "'label' was deleted"),
    "compiled": (lambda m: m.compile(backend="eager"), "anew"),
    "weight norm": (lambda m: nn.utils.parametrizations.weight_norm(m.body[0]), "anew"),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_changed_structure_raises(name: str):
    change, message = STRUCTURE[name]
    module = Sample()
    state = state_of(module)
    change(module)
    with pytest.raises(UnsupportedError, match=message) as caught:
        state.difference()
    assert "anew" in str(caught.value)
    with pytest.raises(UnsupportedError):  # and goes on raising until it is put right
        state.difference()


def test_hooks_from_before_are_no_change_and_their_removal_is_one():
    module = Sample()
    hook = module.body[0].register_forward_hook(lambda *a: None)
    state = state_of(module)
    assert state.difference() is None
    hook.remove()
    with pytest.raises(UnsupportedError, match="hook"):
        state.difference()


def test_check_wrappable_names_inference_tensors_and_other_buffers():
    with torch.inference_mode():
        module = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="'weight' was made in inference mode"):
        check_wrappable(module)

    class Odd(Tensor):
        pass

    module = nn.Module()
    module.register_buffer("odd", torch.ones(2).as_subclass(Odd))
    with pytest.raises(UnsupportedError, match="'odd' is a Odd"):
        check_wrappable(module)


def test_changes_travel():
    module = Sample()
    with DataParallel(module, 2, backend="local") as model:
        module.body[1].p = 0.0
        module.body[2].eval()
        module.config.rate = 0.25
        module.names.append("c")
        module.scale.mul_(3)
        module.none = torch.full((3,), 7.0)
        module.body[0].bias.requires_grad_(False)

        def look(m: nn.Module) -> Any:
            return (
                *(
                    m.body[1].p,
                    m.body[2].training,
                    m.training,
                    m.config.rate,
                    m.names,
                    m.scale.tolist(),
                    m.none.tolist(),
                ),
                m.body[0].bias.requires_grad,
            )

        assert model.run(look) == [(0.0, False, True, 0.25, ["a", "b", "c"], [3.0, 3.0], [7.0, 7.0, 7.0], False)] * 2
        module.none.add_(1)
        module.none = module.none.clone()
        assert model.run(lambda m: m.none.tolist()) == [[8.0, 8.0, 8.0]] * 2
        model.eval()
        assert model.run(lambda m: any(x.training for x in m.modules())) == [False] * 2
        module.none = None
        assert model.run(lambda m: m.none) == [None] * 2


def test_an_attribute_that_cannot_travel_is_named():
    module = Sample()
    with DataParallel(module, 0) as model:
        module.label = threading.Lock()
        with pytest.raises(UnsupportedError, match="label"):
            model.run(lambda m: None)


def test_looking_is_cheap():
    """Six layers as of a small language model: 62 modules, 76 parameters."""
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    module = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    state = state_of(module)
    took = []
    for _ in range(200):
        start = time.perf_counter()
        assert state.difference() is None
        took.append(time.perf_counter() - start)
    assert sorted(took)[20] < 300e-6

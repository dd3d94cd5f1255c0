"""Nested containers come back as they were."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils import _pytree

from torchdl_ray import tree

from .sample_trees import Batch, Frozen, Output, Pair, containers, same


@pytest.mark.parametrize("name", containers(torch.ones(4, 2)))
def test_containers_come_back_as_they_were(name: str) -> None:
    value = containers(torch.arange(8.0).reshape(4, 2))[name]
    leaves, spec = tree.flatten(value)
    assert same(tree.unflatten(spec, leaves), value)
    assert len(tree.paths(spec)) == len(leaves) == spec.num_leaves
    again = pickle.loads(cloudpickle.dumps(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    assert same(tree.unflatten(again, leaves), value)


def test_output_keeps_items_and_attributes_in_step() -> None:
    leaves, spec = tree.flatten(Output(logits=torch.ones(2)))
    back = tree.unflatten(spec, [leaf if leaf is None else "new" for leaf in leaves])
    assert (back["logits"], back.logits, back.loss, list(back)) == ("new", "new", None, ["logits"])


def test_unset_fields_stay_unset_and_types_are_leaves() -> None:
    leaves, spec = tree.flatten([Frozen(1), Frozen, Batch])
    back = tree.unflatten(spec, leaves)
    assert not hasattr(back[0], "late")
    assert back[1:] == [Frozen, Batch]


def test_specs_differ_where_structures_differ() -> None:
    x = torch.ones(1)
    specs = [tree.flatten(value)[1] for value in (x, [x], (x,), {"a": x}, {"b": x}, Batch(x), Pair(x, x), [x, x])]
    assert len(set(specs)) == len(specs)
    assert tree.flatten({"a": 1})[1] == tree.flatten({"a": torch.ones(3)})[1]


def test_registered_class_travels_with_its_functions() -> None:
    class Wrapped:
        def __init__(self, x: Any) -> None:
            self.x = x

    _pytree.register_pytree_node(Wrapped, lambda w: ([w.x], None), lambda children, _: Wrapped(*children))
    leaves, spec = tree.flatten({"w": Wrapped(3)})
    del _pytree.SUPPORTED_NODES[Wrapped]
    assert tree.unflatten(pickle.loads(cloudpickle.dumps(spec)), leaves)["w"].x == 3


def test_is_leaf_stops_the_descent_and_plain_lists_may_be_leaves() -> None:
    leaves, _ = tree.flatten([Pair(1, 2), 3], is_leaf=lambda value: isinstance(value, Pair))
    assert leaves == [Pair(1, 2), 3]
    value = {"names": ["a", "b"], "more": [["c"], "d"], "x": [torch.ones(2), 1], "none": ()}
    leaves, spec = tree.flatten(value, plain_lists=True)
    assert leaves[:2] == [["a", "b"], [["c"], "d"]]
    assert len(leaves) == 5
    assert same(tree.unflatten(spec, leaves), value)
    assert tree.flatten({**value, "names": ["a"] * 9}, plain_lists=True)[1] == spec
    assert tree.flatten((1, ["a"]), plain_lists=True)[0] == [1, ["a"]]


def test_wrong_number_of_leaves() -> None:
    with pytest.raises(ValueError, match="2 leaves was given 1"):
        tree.unflatten(tree.flatten([1, 2])[1], [1])


def test_outputs_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutput(last_hidden_state=torch.ones(4, 2))
    leaves, spec = tree.flatten(value)
    back = tree.unflatten(spec, leaves)
    assert type(back) is type(value)
    assert back.last_hidden_state is value.last_hidden_state
    assert back.hidden_states is None
    assert tree.gather([value, value]).last_hidden_state.shape == (8, 2)

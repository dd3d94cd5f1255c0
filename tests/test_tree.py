"""Cutting and joining nested batches. Expected values come from plain torch, from numpy or from arithmetic."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from torchdl_ray import tree
from torchdl_ray.errors import ArgumentError, GatherError, ScatterError, TorchdlError

from .sample_trees import Batch, Frozen, Output, Pair, same


@pytest.mark.parametrize("workers", [1, 4, 7])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 36])
def test_shards_are_those_of_tensor_split(rows: int, workers: int) -> None:
    x = torch.arange(rows * 2.0).reshape(rows, 2)
    shards = tree.scatter({"x": x, "a": x.numpy(), "names": [str(i) for i in range(rows)]}, workers)
    for shard, expected in zip(shards, torch.tensor_split(x, workers), strict=True):
        assert same(shard["x"], expected)
        assert same(shard["a"], expected.numpy())
        assert shard["names"] == [str(int(row[0]) // 2) for row in expected]


def test_36_rows_on_7() -> None:
    assert [len(x) for x in tree.scatter(torch.zeros(36), 7)] == [6, 5, 5, 5, 5, 5, 5]


def test_other_objects_pass_to_all_alike() -> None:
    marker = object()
    given_tree = {"x": torch.ones(4), "n": None, "s": "text", "i": 3, "b": True, "o": marker, "z": torch.tensor(2.0)}
    for shard in tree.scatter(given_tree, 2):
        assert len(shard["x"]) == 2
        assert all(shard[key] is given_tree[key] for key in "nsiboz")


def test_replicate_hands_a_value_to_all_shards_whole() -> None:
    bias, names = torch.ones(7), ["a", "b", "c", "d"]
    value = {"x": torch.ones(4), "bias": tree.replicate({"b": bias}), "names": tree.replicate(names)}
    for shard in tree.scatter(value, 2):
        assert shard["bias"]["b"] is bias
        assert shard["names"] == names


def test_lengths_beside_a_tensor_of_64_rows() -> None:
    found = tree.plan((torch.zeros(64, 3), list(range(64)), [1, 2, 3]), {"names": tuple("ab" * 32)})
    assert found.rows == 64
    assert found.kind == ("cut", "list_cut", "object", "object", "object", "list_cut")
    assert found.cut(1, 30, 34) == [30, 31, 32, 33]
    assert found.paths == ["args[0]", "args[1]", "args[2][0]", "args[2][1]", "args[2][2]", "kwargs['names']"]


def test_the_tuple_of_arguments_is_not_a_list_with_an_entry_per_row() -> None:
    found = tree.plan(("a", "b"), {"x": torch.zeros(2, 3)})
    assert found.kind == ("object", "object", "cut")
    assert tree.unflatten(found.spec, found.leaves)[0] == ("a", "b")


def test_plan_of_keyword_arguments_and_remote_values() -> None:
    class Remote(torch.Tensor):
        pass

    remote = torch.zeros(0).as_subclass(Remote)

    def rows_of(value: Any) -> int | None:
        return 6 if isinstance(value, Remote) else None

    found = tree.plan((), {"x": remote, "y": [torch.zeros(6)], "t": torch.tensor(1)}, is_remote=rows_of)
    assert (found.rows, found.kind) == (6, ("remote", "cut", "same_tensor"))
    with pytest.raises(
        ScatterError, match=r"kwargs\['y'\] has 5 rows along dim 0 \(shape \[5\]\), but args\[0\] has 6"
    ):
        tree.plan((remote,), {"y": torch.zeros(5)}, is_remote=rows_of)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.zeros(64), torch.zeros(63)), {}, r"args\[1\] has 63 rows .* args\[0\] has 64.*replicate"),
        ((torch.zeros(64, 2),), {"mask": torch.zeros(7)}, r"kwargs\['mask'\] has 7 rows .* args\[0\] has 64"),
        (({"x": [torch.zeros(2), np.zeros(3)]},), {}, r"args\[0\]\['x'\]\[1\] has 3 .* args\[0\]\['x'\]\[0\] has 2"),
        ((Batch(torch.zeros(2), torch.zeros(1)),), {}, r"args\[0\]\.mask has 1 .* args\[0\]\.x has 2"),
        (
            (pack_sequence([torch.zeros(3), torch.zeros(2)]),),
            {},
            r"args\[0\]\.batch_sizes has 3 .* args\[0\]\.data has 5",
        ),
        ((torch.zeros(0, 3),), {}, r"batch is empty: args\[0\] has no rows"),
        (("text", torch.tensor(1.0)), {"k": None}, r"nothing to cut.*args\[0\], args\[1\], kwargs\['k'\]"),
        ((), {}, "no arguments"),
    ],
)
def test_scatter_errors(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ScatterError, match=message):
        tree.plan(args, kwargs)


def test_wrong_scatter_arguments() -> None:
    with pytest.raises(ScatterError, match="num_shards is 0"):
        tree.scatter(torch.ones(3), 0)
    with pytest.raises(ArgumentError, match="dim is -1"):
        tree.scatter(torch.ones(3), 2, dim=-1)
    assert tree.scatter("text", 2, require_rows=False) == ["text", "text"]
    assert tree.plan((1,), {}, require_rows=False).rows == 0


# ---- join and gather


def test_gather_and_scatter_are_differentiable() -> None:
    x = torch.arange(10.0, requires_grad=True)
    whole = tree.gather([{"y": part * (index + 1)} for index, part in enumerate(tree.scatter(x, 3))])["y"]
    whole.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_scalars_are_the_weighted_mean_or_the_sum() -> None:
    losses = [torch.tensor(4.0), torch.tensor(1.0)]
    rows = [torch.zeros(1), torch.zeros(9)]
    assert tree.gather(losses, weights=[1, 9]).item() == pytest.approx(1.3)
    assert tree.gather(list(zip(losses, rows, strict=True)))[0].item() == pytest.approx(1.3)
    assert tree.gather(losses).item() == 2.5
    assert tree.gather(losses, reduction="sum").item() == 5.0
    assert tree.gather([torch.tensor(3), torch.tensor(4)], reduction="sum").item() == 7
    half = tree.gather([torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(1.0, dtype=torch.bfloat16)])
    assert (half.dtype, half.shape, half.item()) == (torch.bfloat16, (), 1.5)


def test_shards_that_weigh_nothing_bring_no_nan() -> None:
    nan = torch.tensor(float("nan"))
    assert tree.gather([nan, torch.tensor(2.0)], weights=[0, 3]).item() == 2.0
    assert tree.gather([nan, nan], weights=[0, 0]).item() == 0.0


def test_objects_and_lists() -> None:
    shards = [
        {"x": torch.zeros(2), "names": ["a", "b"], "k": 3, "nan": float("nan"), "n": None},
        {"x": torch.zeros(1), "names": ["c"], "k": 3, "nan": float("nan"), "n": None},
    ]
    joined = tree.gather(shards)
    assert joined["names"] == ["a", "b", "c"]
    assert (joined["k"], joined["n"]) == (3, None)
    assert joined["nan"] != joined["nan"]


def test_equal_settings_stay_one_where_only_one_shard_has_that_many_rows() -> None:
    shards = [
        {"x": torch.zeros(2), "kernel": [3, 3], "names": ["a", "b"], "columns": [["a", "b"], {"k": (1, 2)}, []]},
        {"x": torch.zeros(1), "kernel": [3, 3], "names": ["c"], "columns": [["c"], {"k": (3,)}, []]},
    ]
    joined = tree.gather(shards)
    assert joined["kernel"] == [3, 3]
    assert joined["names"] == ["a", "b", "c"]
    assert joined["columns"] == [["a", "b", "c"], {"k": (1, 2, 3)}, []]
    assert tree.gather([["a"], ["a"]]) == ["a"]
    assert tree.gather([["a"], ["b"]], rows=[1, 1]) == ["a", "b"]


@pytest.mark.parametrize(
    ("shards", "rows", "message"),
    [
        # an LSTM's state [layers, rows, hidden]: two layers beside shards of 5 and 4 rows
        (
            [(torch.zeros(5, 3), torch.zeros(2, 5, 3)), (torch.zeros(4, 3), torch.zeros(2, 4, 3))],
            None,
            r"output\[1\] .*",
        ),
        ([torch.zeros(5, 3), torch.zeros(4, 2)], [5, 4], r"shapes on the shards are \[\[5, 3\], \[4, 2\]\]"),
        ([torch.zeros(7), torch.zeros(7)], [5, 4], r"rows are \[5, 4\].*`\.shards`.*`out_dims`"),
        ([{"k": "a"}, {"k": "b"}], None, r"output\['k'\] differs among the shards \('a', 'b'\)"),
        ([{"k": 1}, {"j": 1}], None, r"shard 0 holds dict\(\['k'\]: \*\), but shard 1 holds dict\(\['j'\]: \*\)"),
        ([[1], (1,)], None, r"shard 0 holds \*, but shard 1 holds tuple"),
        ([torch.tensor(1), torch.tensor(1)], None, r"0-dim torch.int64.*reduction='sum'"),
        ([torch.zeros(1), torch.zeros(1).double()], None, "different dtypes.*float32 .*float64"),
        ([np.zeros(3), np.zeros(3)], [2, 1], "one entry per row|cannot"),
    ],
)
def test_what_does_not_join_is_loud(shards: Any, rows: Any, message: str) -> None:
    if isinstance(shards[0], np.ndarray):
        shards[1] = shards[1] + 1
    with pytest.raises(GatherError, match=message):
        tree.gather(shards, rows=rows)


def test_wrong_gather_arguments() -> None:
    for bad in (
        {"shards": []},
        {"shards": [1, 2], "rows": [1]},
        {"shards": [1], "weights": []},
        {"shards": [1], "dim": -1},
    ):
        with pytest.raises(ArgumentError):
            tree.gather(**bad)
    with pytest.raises(ArgumentError, match="'max'"):
        tree.gather([1], reduction="max")  # type: ignore[arg-type]


def test_joins_by_shape_alone() -> None:
    assert tree.joins([(5, 3), (4, 3)], [5, 4])
    assert tree.joins([(2, 5), (2, 4)], [5, 4], dim=1)
    assert not tree.joins([(5, 3), (4, 2)], [5, 4])
    assert not tree.joins([(5,), (4,)], [5, 4], dim=1)
    assert not tree.joins([(), ()], [1, 1])
    assert not tree.joins([(7,), (7,)], [5, 4])


def test_microbatches_join_to_one_value() -> None:
    pieces = [
        [torch.zeros(2, 3), torch.tensor(4.0), ["a", "b"], "k"],
        [torch.ones(1, 3), torch.tensor(1.0), ["c"], "k"],
    ]
    logits, loss, names, k = tree.join_pieces(pieces, [2, 1], [0.2, 0.1])
    assert torch.equal(logits, torch.tensor([[0.0], [0.0], [1.0]]).expand(3, 3))
    assert loss.item() == pytest.approx(3.0)
    assert (names, k) == (["a", "b", "c"], "k")
    assert tree.join_pieces(pieces, [2, 1], [0.2, 0.1], mean=False)[1].item() == 5.0
    with pytest.raises(GatherError, match="different numbers"):
        tree.join_pieces([[1], [1, 2]], [1, 1], [1, 1])
    only = object()
    assert tree.join_pieces([[only]], [3], [0.0]) == [only]


# ---- properties


def dressed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.text("abc", min_size=1, max_size=2)
    return st.one_of(
        st.dictionaries(names, inner, max_size=3),
        st.dictionaries(names, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Batch, inner, inner),
        st.builds(Frozen, inner, inner),
        st.builds(Output, loss=inner, logits=inner),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, int, int]:
    """A tree whose tensors have N rows along dim, N and dim. Plain objects stand alone, not in lists of N of them."""
    rows, dim = draw(st.integers(1, 9)), draw(st.integers(0, 2))
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])

    def tensor(dtype: torch.dtype, tail: list[int], lead: int, seed: int) -> torch.Tensor:
        shape = [lead] * dim + [rows, *tail]
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    cut = st.builds(tensor, dtypes, st.lists(st.integers(1, 3), max_size=2), st.integers(1, 3), st.integers(0, 99))
    arrays = cut.filter(lambda x: x.dtype != torch.bfloat16).map(lambda x: x.numpy())
    leaves = st.one_of(cut, cut, arrays, st.just([f"row {i}" for i in range(rows)]), st.none(), st.just({"k": 3}))
    nested = draw(st.recursive(leaves, dressed, max_leaves=8))
    return {"x": draw(cut), "nested": {"t": nested}}, rows, dim


def reads_as_rows_of_a_shard(value: Any, sizes: list[int]) -> bool:
    """True where a list without tensors, of other than N entries, has as many as every shard has rows."""
    found: list[Any] = []
    tree.flatten(value, is_leaf=lambda part: bool(found.append(part)))
    lists = [part for part in found if type(part) in (list, tuple)]
    return len(set(sizes)) == 1 and len(sizes) > 1 and any(len(part) == sizes[0] for part in lists)


@given(batches(), st.integers(1, 12))
def test_gather_is_the_inverse_of_scatter(batch: tuple[Any, int, int], workers: int) -> None:
    value, rows, dim = batch
    shards = tree.scatter(value, workers, dim)
    sizes = [shard["x"].shape[dim] for shard in shards]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assume(not reads_as_rows_of_a_shard(value, sizes))
    assert same(tree.gather(shards, dim), value)
    assert same(tree.gather(shards, dim, rows=sizes), value)


@given(batches())
def test_any_tree_survives_flattening_and_the_wire(batch: tuple[Any, int, int]) -> None:
    leaves, spec = tree.flatten(batch[0])
    packed = [tree.pack(leaf) for leaf in leaves]
    assert same(tree.unflatten(spec, [tree.unpack(wire) for wire in packed]), batch[0])


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 9)), min_size=1, max_size=6),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_the_mean_of_scalars_is_numpys_average(parts: list[tuple[float, int]], dtype: torch.dtype) -> None:
    values, weights = [value for value, _ in parts], [weight for _, weight in parts]
    joined = tree.gather([torch.tensor(value, dtype=dtype) for value in values], weights=weights)
    if len(parts) == 1:
        expected = values[0]
    else:
        expected = float(np.average(values, weights=weights)) if sum(weights) else 0.0
    assert joined.dtype == dtype
    assert joined.item() == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_errors_are_of_the_packages_tree() -> None:
    assert issubclass(ScatterError, TorchdlError)
    assert issubclass(GatherError, ValueError)


@pytest.mark.parametrize("rows", [2, 5])
def test_a_tuple_of_numbers_is_never_cut(rows):
    """A size or some dimensions, also where it is as long as the batch; a tuple of strings has an entry per row."""
    x = torch.zeros(rows, 3, 3)
    for shard in tree.scatter((x, (1, 2), torch.Size((8, 8)), tuple("ab" if rows == 2 else "abcde")), 2):
        assert shard[1] == (1, 2)
        assert shard[2] == (8, 8)
        assert len(shard[3]) == len(shard[0])

"""Who gets which rows with what weight. Expected values come from numpy and from arithmetic."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdl_ray.errors import ArgumentError
from torchdl_ray.layout import Layout, Place, shard_sizes, slices


@pytest.mark.parametrize(
    ("rows", "shards", "sizes"),
    [
        (36, 7, (6, 5, 5, 5, 5, 5, 5)),
        (36, 4, (9, 9, 9, 9)),
        (5, 4, (2, 1, 1, 1)),
        (3, 4, (1, 1, 1, 0)),
        (1, 7, (1, 0, 0, 0, 0, 0, 0)),
        (0, 4, (0, 0, 0, 0)),
        (13, 2, (7, 6)),
        (17, 1, (17,)),
    ],
)
def test_sizes(rows: int, shards: int, sizes: tuple[int, ...]) -> None:
    assert shard_sizes(rows, shards) == sizes


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_sizes_are_those_of_array_split(rows: int, shards: int) -> None:
    sizes = shard_sizes(rows, shards)
    assert list(sizes) == [len(part) for part in np.array_split(np.arange(rows), shards)]
    assert max(sizes) - min(sizes) <= 1


def test_slices_follow_each_other() -> None:
    assert slices((3, 0, 2)) == (slice(0, 3), slice(3, 3), slice(3, 5))
    assert slices(()) == ()


def test_layout_is_a_value() -> None:
    layout = Layout(3)
    assert layout == Layout(3)
    assert hash(layout) == hash(Layout(3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.num_replicas = 4  # type: ignore[misc]
    assert layout.places() == tuple(Place(rank, replica=rank, shard=rank, replies=True) for rank in range(3))
    assert layout.num_ranks == 3
    for rank in (-1, 3):
        with pytest.raises(ArgumentError, match=f"rank {rank} does not exist"):
            layout.place(rank)


def test_one_shard_and_one_piece_weigh_exactly_one() -> None:
    assert Layout(1).shards(7)[0].pieces == ((7, 1.0),)
    assert Layout(1).shards(3, [0.1, 0.2, 0.3])[0].pieces == ((3, 1.0),)


def test_rows_as_weights() -> None:
    first, *others = Layout(4).shards(5)
    assert (first.start, first.stop, first.rows, first.weight) == (0, 2, 2, 0.4)
    assert [(s.index, s.start, s.stop, s.pieces) for s in others] == [
        (1, 2, 3, ((1, 0.2),)),
        (2, 3, 4, ((1, 0.2),)),
        (3, 4, 5, ((1, 0.2),)),
    ]


def test_token_counts_as_weights() -> None:
    # worker 0 has one valid token, worker 1 has nine
    shards = Layout(2).shards(2, [1, 9])
    assert [shard.weight for shard in shards] == [0.1, 0.9]


def test_shards_without_rows_and_rows_without_weight() -> None:
    shards = Layout(3).shards(2, [0, 5])
    assert [shard.pieces for shard in shards] == [((1, 0.0),), ((1, 1.0),), ()]
    assert shards[2].weight == 0
    assert [shard.pieces for shard in Layout(2).shards(3, [0, 0, 0])] == [((2, 0.0),), ((1, 0.0),)]


def test_microbatches_are_balanced_and_bounded() -> None:
    assert Layout(1).shards(10, microbatch_size=4)[0].pieces == ((4, 0.4), (3, 0.3), (3, 0.3))
    assert Layout(1).shards(10, microbatch_size=10)[0].pieces == ((10, 1.0),)
    assert Layout(1).shards(10, microbatch_size=100)[0].pieces == ((10, 1.0),)
    pieces = [shard.pieces for shard in Layout(2).shards(5, [1, 2, 3, 4, 0], microbatch_size=2)]
    assert pieces == [((2, 0.3), (1, 0.3)), ((2, 0.4),)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": -1}, "rows is -1"),
        ({"rows": 3, "microbatch_size": 0}, "microbatch_size is 0"),
        ({"rows": 3, "row_weights": [1, 2]}, "2 row weights for 3 rows"),
        ({"rows": 2, "row_weights": [1, -2]}, "row 1 is -2"),
        ({"rows": 2, "row_weights": [math.nan, 1]}, "row 0 is nan"),
        ({"rows": 2, "row_weights": [1, math.inf]}, "row 1 is inf"),
        ({"rows": 2, "row_weights": [1e308, 1e308]}, "infinity"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Layout(2).shards(**arguments)  # type: ignore[arg-type]


def test_wrong_sizes() -> None:
    with pytest.raises(ArgumentError, match="num_replicas is 0"):
        Layout(0)
    with pytest.raises(ArgumentError, match="3 rows on 0 shards"):
        shard_sizes(3, 0)


@given(st.data(), st.integers(0, 60), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 7)))
def test_shares_add_up_and_rows_are_all_there_once(
    data: st.DataObject, rows: int, replicas: int, microbatch_size: int | None
) -> None:
    weights = data.draw(st.none() | st.lists(st.integers(0, 1000), min_size=rows, max_size=rows))
    shards = Layout(replicas).shards(rows, weights, microbatch_size)
    assert [row for shard in shards for row in range(shard.start, shard.stop)] == list(range(rows))
    assert all(sum(n for n, _ in shard.pieces) == shard.rows for shard in shards)
    sizes = [n for shard in shards for n, _ in shard.pieces]
    assert all(1 <= n <= (microbatch_size or n) for n in sizes)
    total = sum(weights) if weights is not None else rows
    start = 0
    for shard in shards:
        for n, share in shard.pieces:
            own = sum(weights[start : start + n]) if weights is not None else n
            assert share == (own / total if total else 0.0)
            start += n
    assert math.fsum(shard.weight for shard in shards) == pytest.approx(1.0 if total else 0.0)

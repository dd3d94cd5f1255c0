"""Seeds of a worker's random numbers: repeatable, and different for all that differs."""

from __future__ import annotations

import hashlib
import itertools

import torch

from torchdl_ray.calls import seed_generators, seed_of
from torchdl_ray.program import RandomKey

KEY = RandomKey(1, 2, 3)


def test_every_field_changes_the_seed() -> None:
    grid = list(itertools.product([0, 1, 11], repeat=5))
    seeds = {seed_of(RandomKey(a, b, c), shard, piece) for a, b, c, shard, piece in grid}
    assert len(seeds) == len(grid)  # 1/11 and 11/1 are not the same either
    assert all(0 <= s < 2**63 for s in seeds)


def test_seeds_are_the_same_in_every_process() -> None:
    digest = hashlib.blake2b(b"1/2/3/4/5", digest_size=8).digest()
    assert seed_of(KEY, 4, 5) == int.from_bytes(digest, "little") // 2 == 4687106553491433464


def test_generators_draw_what_manual_seed_draws() -> None:
    seed = seed_of(KEY, 0, 0)
    torch.manual_seed(seed)
    expected = torch.rand(5)
    seed_generators(seed, torch.device("cpu"))
    assert torch.equal(torch.rand(5), expected)

from __future__ import annotations

import os
import resource
import threading
import time

import pytest
import torch

from torchdl_ray.errors import CollectiveError
from torchdl_ray.rendezvous import Watch
from torchdl_ray.shared_block import Block, supported
from torchdl_ray.shared_memory import SharedMemoryGroup

from .ranks import Ranks
from .test_collective import rank_order_sum, same_bits, value

pytestmark = pytest.mark.skipif(not supported(), reason="needs Linux on x86_64")


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def in_threads(size, body, slot_bytes=1 << 20, timeout_s=10.0):
    """Runs `body(group)` for each rank in a thread of this process; returns values or errors in rank order."""
    block = Block.create(size, slot_bytes)
    groups = [
        SharedMemoryGroup(block if rank == 0 else Block.attach(block.address), rank, Watch("g", rank, timeout_s))
        for rank in range(size)
    ]
    block.seal()
    results: list[object] = [None] * size

    def run(rank):
        try:
            results[rank] = body(groups[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for group in groups:
        group.close()
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("slot_bytes", [256, 4096, 1 << 20])
def test_tensors_larger_than_a_slot_travel_in_pieces(size, slot_bytes):
    count = 1_500

    def body(group):
        vectors = [value(group.rank, count), value(group.rank, count, dtype=torch.bfloat16), torch.tensor(1)]
        group.all_reduce(vectors).wait()
        assert same_bits(vectors[0], rank_order_sum(size, count))
        assert same_bits(vectors[1], rank_order_sum(size, count, dtype=torch.bfloat16))
        assert vectors[2].item() == size
        parts = group.all_gather(value(group.rank, count, 3))
        assert all(same_bits(part, value(r, count, 3)) for r, part in enumerate(parts))
        state = [value(group.rank, count), value(group.rank, 3, count).t()]
        group.broadcast(state, size - 1)
        assert same_bits(state[0], value(size - 1, count))
        assert same_bits(state[1].t(), value(size - 1, 3, count))
        return "right"

    assert in_threads(size, body, slot_bytes) == ["right"] * size


def test_the_ring_is_used_again_and_again_while_many_reductions_are_under_way():
    sizes = [int(n) for n in torch.randint(1, 400, (200,), generator=torch.Generator().manual_seed(0))]

    def body(group):
        tensors = [torch.full((n,), float(group.rank + n)) for n in sizes]
        handles = [group.all_reduce([tensor]) for tensor in tensors]
        for handle in reversed(handles):
            handle.wait()
        assert all((t == 2 * n + 1).all() for t, n in zip(tensors, sizes, strict=True))
        return sum(handle.done() for handle in handles)

    assert in_threads(2, body, slot_bytes=8192) == [200, 200]


def test_a_reduction_goes_on_while_the_rank_does_other_things():
    def body(group):
        first, second = torch.ones(100), torch.ones(100)
        group.all_reduce([first])
        if group.rank == 1:
            time.sleep(0.2)  # rank 0 is in its second start by now, and waits for nobody there
        group.all_reduce([second])
        if group.rank == 0:
            return "not held up"
        return None

    begun = time.monotonic()
    assert in_threads(2, body)[0] == "not held up"
    assert time.monotonic() - begun < 5


def test_who_leaves_early_or_fails_is_named_by_the_others():
    def body(group):
        if group.rank == 1:
            group.close()
            return "left"
        group.all_reduce([torch.ones(3)]).wait()
        return None

    errors = in_threads(3, body)
    assert errors[1] == "left"
    for rank in (0, 2):
        assert isinstance(errors[rank], CollectiveError)
    texts = f"{errors[0]} {errors[2]}"
    assert "left the group" in texts

    def stopped(group):
        if group.rank == 1:
            return "late"
        group.all_reduce([torch.ones(3)]).wait()
        return None

    begun = time.monotonic()
    errors = in_threads(2, stopped, timeout_s=0.3)
    assert 0.3 <= time.monotonic() - begun < 3
    assert "all_reduce of 1 tensors, 12 bytes, failed on rank 0 of group 'g' after 0.3" in str(errors[0])
    assert "ranks [1] are late" in str(errors[0])


def test_after_leaving_nothing_works():
    def body(group):
        group.close()
        group.close()
        group.all_reduce([torch.ones(3)])

    assert all("it was closed. Join a new group" in str(error) for error in in_threads(2, body))


def test_a_block_is_found_by_its_address_only_while_it_is_open():
    block = Block.create(2, 4096)
    pid, fd, *rest = block.address.split(":")
    other = ":".join([pid, fd, *rest[:-1], "1"])
    with pytest.raises(OSError, match="another block"):
        Block.attach(other)
    Block.attach(block.address).release()
    block.seal()
    with pytest.raises(OSError, match="No such file"):
        Block.attach(block.address)
    block.release()
    block.release()


def test_a_block_that_cannot_be_had_is_an_error_and_leaves_nothing():
    before = shared_files(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="more than a quarter of"):
        Block.create(2, 1 << 46)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            Block.create(2, 1 << 16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (shared_files(), len(os.listdir("/proc/self/fd"))) == before


def reduce_for_ever(rank, rendezvous, tell):
    from torchdl_ray.collective import join

    group = join(rendezvous, rank)
    tell(group.kind)
    while True:
        group.all_reduce([torch.ones(500_000)]).wait()


def test_nothing_is_left_in_shared_memory_after_all_ranks_are_killed():
    before = shared_files()
    with Ranks(3, reduce_for_ever) as ranks:
        assert ranks.heard_from_all() == ["shared_memory"] * 3
        for rank in range(3):
            ranks.kill(rank)
        for process in ranks.processes.values():
            process.join(5)
    assert shared_files() <= before

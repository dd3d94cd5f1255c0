from __future__ import annotations

import functools
import pickle
import resource
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdl_ray import agreement
from torchdl_ray.collective import (
    Collective,
    Rendezvous,
    Solo,
    StopFlag,
    TorchGroup,
    host_store,
    join,
)
from torchdl_ray.errors import ArgumentError, ClosedError, CollectiveError
from torchdl_ray.rendezvous import Watch

from .ranks import Ranks

CPU_TRANSPORTS = ["shared_memory", "gloo"]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int16,
    torch.int64,
    torch.uint8,
]


def value(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What `rank` contributes: known to all, so that each can add up what it should get."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 50, shape, generator=generator).to(dtype)


def rank_order_sum(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return functools.reduce(torch.add, [value(r, *shape, dtype=dtype) for r in range(size)])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


# Sums


def sum_everything(rank, rendezvous, tell):
    group, size = join(rendezvous, rank), rendezvous.size
    assert group.kind == rendezvous.backend
    tensors = [value(rank, 1001, dtype=dtype) for dtype in DTYPES]
    group.all_reduce(tensors).wait()
    for tensor, dtype in zip(tensors, DTYPES, strict=True):
        assert same_bits(tensor, rank_order_sum(size, 1001, dtype=dtype)), dtype

    flat, wanted = value(rank, 60_000), rank_order_sum(size, 60_000)
    generator = torch.Generator().manual_seed(7)
    for _ in range(10):  # however the elements are cut into calls, and at whatever offset, in any order of waiting
        cuts = torch.randint(0, 60_000, (5,), generator=generator).sort().values.tolist()
        bucket = torch.cat([torch.zeros(3), flat])[3:]
        handles = [group.all_reduce([part]) for part in bucket.tensor_split(cuts)]
        for index in torch.randperm(len(handles), generator=generator).tolist():
            handles[index].wait()
        assert same_bits(bucket.clone(), wanted)

    odd = [torch.tensor(float(rank)), torch.empty(0), value(rank, 6, 4).t(), nn.Parameter(value(rank, 3))]
    group.all_reduce(odd).wait()
    assert odd[0].item() == sum(range(size))
    assert same_bits(odd[2].t(), rank_order_sum(size, 6, 4))
    assert same_bits(odd[3].detach(), rank_order_sum(size, 3))
    group.all_reduce([]).wait()
    group.close()
    group.close()
    assert not dist.is_initialized()
    return "right"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("backend", CPU_TRANSPORTS)
def test_sums_have_the_bits_of_rank_order_on_every_transport(size, backend):
    with Ranks(size, sum_everything, backend=backend) as ranks:
        assert ranks.heard_from_all() == ["right"] * size


def use_the_rest(rank, rendezvous, tell):
    group, size = join(rendezvous, rank), rendezvous.size
    for dtype in [*DTYPES, torch.bool]:
        parts = group.all_gather(value(rank, 3, 5, dtype=dtype))
        assert all(same_bits(part, value(r, 3, 5, dtype=dtype)) for r, part in enumerate(parts))
    assert [part.item() for part in group.all_gather(torch.tensor(rank))] == list(range(size))
    assert [part.shape for part in group.all_gather(torch.empty(0, 2))] == [(0, 2)] * size

    state = [value(rank, 100), value(rank, 4, 6).t(), torch.tensor(rank), nn.Parameter(value(rank, 2)), torch.empty(0)]
    group.broadcast(state, 1)
    assert same_bits(state[0], value(1, 100))
    assert same_bits(state[1].t(), value(1, 4, 6))
    assert state[2].item() == 1
    assert same_bits(state[3].detach(), value(1, 2))

    if rank == 0:
        time.sleep(0.3)
    before = time.monotonic()
    group.barrier()
    assert rank == 0 or time.monotonic() - before > 0.2

    handle = group.all_reduce([vector := torch.ones(10)])
    while not handle.done():
        time.sleep(0.001)
    handle.wait()
    assert handle.done()
    assert vector.tolist() == [size] * 10
    group.close()
    return "right"


@pytest.mark.parametrize("backend", CPU_TRANSPORTS)
def test_gather_broadcast_barrier_and_polling(backend):
    with Ranks(3, use_the_rest, backend=backend) as ranks:
        assert ranks.heard_from_all() == ["right"] * 3


def train_in_generations(rank, rendezvous, tell):
    results = []
    for generation in range(3):
        group = join(Rendezvous(rendezvous.host, rendezvous.port, f"generation-{generation}", 2, ("n", "n")), rank)
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1, dtype=torch.float64))
        model(torch.ones(1, 4, dtype=torch.float64) * (rank + 1)).sum().backward()
        results.append(model.module.weight.grad.tolist())
        vector = torch.full((5,), float(rank + generation))
        group.all_reduce([vector]).wait()
        assert vector.tolist() == [1 + 2 * generation] * 5
        del model
        group.close()
    return results


def test_the_default_torch_group_trains_ddp_in_every_generation():
    with Ranks(2, train_in_generations) as ranks:
        assert ranks.heard_from_all() == [[[[1.5] * 4]] * 3] * 2


# Failure


def reduce_for_ever(rank, rendezvous, tell, use_stop_flag):
    stop = StopFlag(rendezvous.connect(), 0) if use_stop_flag else lambda: None
    group = join(rendezvous, rank, stop=stop)
    tensors = [torch.ones(50_000) for _ in range(4)]
    group.all_reduce(tensors).wait()
    tell("ready")
    while True:
        for handle in [group.all_reduce([tensor]) for tensor in tensors]:
            handle.wait()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("backend", CPU_TRANSPORTS)
def test_every_survivor_of_a_kill_is_told_at_once(backend, victim):
    with Ranks(4, reduce_for_ever, False, backend=backend) as ranks:
        ranks.heard_from_all()
        time.sleep(0.1)
        ranks.kill(victim)
        for error in ranks.heard_from_all(timeout_s=2.0, but=(victim,)):
            assert isinstance(error, CollectiveError)
            assert "group 'group-0'" in str(error)


@pytest.mark.parametrize("backend", CPU_TRANSPORTS)
def test_the_driver_stops_all_ranks_though_a_peer_is_stopped(backend):
    with Ranks(3, reduce_for_ever, True, backend=backend) as ranks:
        ranks.heard_from_all()
        ranks.kill(1, signal.SIGSTOP)
        time.sleep(0.2)
        ranks.store.stop(0, "a worker hangs")
        errors = ranks.heard_from_all(timeout_s=2.0, but=(1,))
        assert all(isinstance(error, CollectiveError) for error in errors)
        assert any("stopped: a worker hangs" in str(error) for error in errors)  # or told by the other that it left


@pytest.mark.parametrize("backend", CPU_TRANSPORTS)
def test_a_stopped_peer_is_given_up_at_the_deadline(backend):
    with Ranks(3, reduce_for_ever, False, backend=backend, timeout_s=1.5) as ranks:
        ranks.heard_from_all()
        before = time.monotonic()
        ranks.kill(1, signal.SIGSTOP)
        errors = [str(error) for error in ranks.heard_from_all(timeout_s=4.0, but=(1,))]
        assert time.monotonic() - before >= 1.4
        assert any("timeout_s=1.5" in error for error in errors)
        if backend == "shared_memory":
            assert any("ranks [1] are late" in error for error in errors)


def reduce_until_it_fails(group):
    try:
        while True:
            group.all_reduce([torch.ones(100_000)]).wait()
    except CollectiveError:
        return


def fail_and_join_again(rank, rendezvous, tell):
    group = join(rendezvous, rank)
    tell("ready")
    reduce_until_it_fails(group)
    with pytest.raises(CollectiveError, match=r"can not be used any more.*Join a new group"):
        group.all_reduce([torch.ones(1)])
    group.close()
    before = time.monotonic()
    again = Rendezvous(rendezvous.host, rendezvous.port, "group-1", 2, ("n", "n"), rendezvous.backend)
    group = join(again, {0: 0, 2: 1}[rank])
    vector = torch.ones(3)
    group.all_reduce([vector]).wait()
    return vector.tolist(), time.monotonic() - before < 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("backend", CPU_TRANSPORTS)
def test_survivors_form_a_new_group_in_the_same_processes(backend, number):
    with Ranks(3, fail_and_join_again, backend=backend, timeout_s=1.5) as ranks:
        ranks.heard_from_all()
        ranks.kill(1, number)
        assert ranks.heard_from_all(timeout_s=10, but=(1,)) == [([2.0] * 3, True)] * 2


# Set-up


def only_join(rank, rendezvous, tell, use_stop_flag=False):
    stop = StopFlag(rendezvous.connect(), 0) if use_stop_flag else lambda: None
    tell("ready")
    join(rendezvous, rank, stop=stop)


def test_closing_the_store_frees_ranks_that_wait_for_an_absent_one():
    with Ranks(3, only_join, absent=(1,)) as ranks:
        ranks.heard_from_all()
        time.sleep(0.2)
        ranks.store.close()
        for error in ranks.heard_from_all(timeout_s=2.0):
            assert "store was closed or lost" in str(error)


def test_a_stop_and_the_deadline_free_them_as_well():
    with Ranks(3, only_join, True, absent=(1,)) as ranks:
        ranks.heard_from_all()
        ranks.store.stop(0, "rank 1 died")
        assert all("rank 1 died" in str(error) for error in ranks.heard_from_all(timeout_s=2.0))
    with Ranks(3, only_join, absent=(1,), timeout_s=0.5) as ranks:
        ranks.heard_from_all()
        assert all("ranks [1] have not come" in str(error) for error in ranks.heard_from_all(timeout_s=3.0))


def die_before_the_group_forms(rank, rendezvous, tell):
    if rank != 1:
        return only_join(rank, rendezvous, tell)
    watch = Watch(rendezvous.name, rank, rendezvous.timeout_s)
    store = dist.PrefixStore(rendezvous.name, rendezvous.connect())
    agreement.agree(store, watch, rendezvous, torch.device("cpu"))
    return "agreed"


@pytest.mark.parametrize("backend", CPU_TRANSPORTS)
def test_closing_the_store_frees_ranks_whose_peer_died_after_agreeing(backend):
    with Ranks(3, die_before_the_group_forms, backend=backend) as ranks:
        assert ranks.heard_from_all() == ["ready", "agreed", "ready"]
        ranks.kill(1)
        time.sleep(0.3)
        ranks.store.close()
        assert all(isinstance(e, CollectiveError) for e in ranks.heard_from_all(timeout_s=3.0, but=(1,)))


def join_without_memory(rank, rendezvous, tell, poor):
    if rank == poor:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    if poor is None and rank == 1:  # as where /proc of the peer cannot be opened
        agreement.Block.attach = classmethod(lambda cls, address: (_ for _ in ()).throw(OSError("no such file")))
    group = join(rendezvous, rank)
    vector = torch.ones(3)
    group.all_reduce([vector]).wait()
    return group.kind, group.note, vector.tolist()


@pytest.mark.parametrize("poor", [0, None])
def test_one_rank_without_shared_memory_sends_all_to_gloo(poor):
    with Ranks(2, join_without_memory, poor) as ranks:
        for kind, note, vector in ranks.heard_from_all():
            assert kind == "gloo"
            assert vector == [2.0] * 3
            assert ("rank 0: [Errno 27]" if poor == 0 else "rank 1: no such file") in note
    with Ranks(2, join_without_memory, poor, backend="shared_memory") as ranks:
        assert all("backend='auto'" in str(error) for error in ranks.heard_from_all())


def test_ranks_on_two_nodes_use_gloo_and_need_no_note():
    with Ranks(2, join_without_memory, 9, nodes=("a", "b")) as ranks:
        assert ranks.heard_from_all() == [("gloo", "", [2.0] * 3)] * 2


# One GPU for two ranks: decided without a GPU at hand


@pytest.mark.parametrize(
    ("gpus", "backend", "kind"),
    [
        (["a", "b"], "auto", "nccl"),
        (["a", "a"], "auto", "gloo"),
        (["a", "a"], "gloo", "gloo"),
        (["a", "a"], "nccl", None),
    ],
)
def test_nccl_is_not_chosen_for_two_ranks_on_one_gpu(monkeypatch, gpus, backend, kind):
    monkeypatch.setattr(agreement, "_gpu_identity", lambda device: gpus[device.index])
    monkeypatch.setattr(agreement.dist, "is_nccl_available", lambda: True)
    rendezvous = Rendezvous("", 0, "g", 2, ("n", "n"), backend)
    store = dist.HashStore()
    results = {}

    def run(rank):
        try:
            results[rank] = agreement.agree(store, Watch("g", rank, 5), rendezvous, torch.device("cuda", rank))
        except CollectiveError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for result in results.values():
        if kind is None:
            assert "ranks [0, 1] share one physical GPU" in str(result)
        else:
            assert result.kind == kind
            assert ("share one physical GPU" in result.note) == (gpus == ["a", "a"] and backend == "auto")
    assert len(results) == 2


# Alone, and the driver's side


def test_solo_does_nothing():
    solo: Collective = Solo()
    tensor = torch.ones(3)
    handle = solo.all_reduce([tensor])
    handle.wait()
    assert handle.done()
    assert tensor.tolist() == [1, 1, 1]
    (copy,) = solo.all_gather(tensor)
    assert copy.tolist() == [1, 1, 1]
    assert copy.data_ptr() != tensor.data_ptr()
    solo.broadcast([tensor], 0)
    solo.barrier()
    solo.close()
    assert not dist.is_initialized()


def be_alone(rank, rendezvous, tell):
    group = join(rendezvous, rank)
    vector = torch.ones(2)
    dist.all_reduce(vector)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model(vector).sum().backward()
    del model
    with pytest.raises(CollectiveError, match="destroy_process_group"):
        join(rendezvous, rank)
    group.close()
    return group.size, vector.tolist(), dist.is_initialized()


def test_a_single_worker_has_a_default_torch_group_too():
    with Ranks(1, be_alone) as ranks:
        assert ranks.heard(0) == (1, [1.0, 1.0], False)


def test_the_stop_flag_sees_its_own_generation_and_the_end_of_the_driver():
    store = host_store()
    seen = Rendezvous(store.host, store.port, "g", 1, ("n",))
    flags = {generation: StopFlag(seen.connect(), generation) for generation in (3, 4)}
    time.sleep(0.1)
    assert [flag() for flag in flags.values()] == [None, None]
    store.stop(3, "resize")
    assert until(lambda: flags[3]() == "resize")
    assert flags[4]() is None
    store.close()
    store.close()
    assert until(lambda: "driver has ended" in (flags[4]() or ""))
    with pytest.raises(ClosedError):
        store.stop(4, "late")


def until(condition, timeout_s=3.0):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and not condition():
        time.sleep(0.01)
    return condition()


def test_a_rendezvous_pickles_and_refuses_what_does_not_fit():
    rendezvous = Rendezvous("h", 1, "g", 2, ("a", "b"))
    assert pickle.loads(pickle.dumps(rendezvous)) == rendezvous
    with pytest.raises(ArgumentError, match="size 2 got 1 node ids"):
        Rendezvous("h", 1, "g", 2, ("a",))
    with pytest.raises(ArgumentError, match="positive timeout_s"):
        Rendezvous("h", 1, "g", 1, ("a",), timeout_s=0)
    with pytest.raises(ArgumentError, match="rank 2 does not exist"):
        join(rendezvous, 2)
    with pytest.raises(ArgumentError, match="needs a Ray actor"):
        join(Rendezvous("h", 1, "g", 1, ("a",), "GLOO"), 0)
    with pytest.raises(CollectiveError, match="no connection to the driver's store"):
        join(Rendezvous("127.0.0.1", 1, "g", 2, ("a", "a"), timeout_s=1), 0)


def test_a_group_that_was_not_connected_says_so():
    with pytest.raises(CollectiveError, match="is not connected"):
        TorchGroup(2, 0, "g").allreduce([torch.ones(1)])


def test_backends_for_the_wrong_device_are_refused():
    store, watch = dist.HashStore(), Watch("g", 0, 1)
    store.set_timeout(timedelta(seconds=1))
    for backend, device in (("nccl", "cpu"), ("shared_memory", "cuda:0")):
        with pytest.raises(ArgumentError, match=f"{backend}' reduces"):
            agreement.agree(store, watch, Rendezvous("", 0, "g", 1, ("n",), backend), torch.device(device))

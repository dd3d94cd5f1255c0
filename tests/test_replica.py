"""One copy of a model among others: the tail that all agree by, gradients summed once, buffers levelled, undo.

Several replicas run in threads of this process. Expected values come from arithmetic and from plain PyTorch.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdl_ray.collective import Solo
from torchdl_ray.errors import CollectiveError
from torchdl_ray.local_group import LocalCollective, _Meeting
from torchdl_ray.replica import PeerFailed, Replica, Stamp, agree, named_tensors

STAMP = Stamp(7, 10**9, 10**12)


class Counted(LocalCollective):
    """Counts the numbers that it sums."""

    num_summed = 0

    def all_reduce(self, tensors: Any) -> Any:
        self.num_summed += sum(t.numel() for t in tensors)
        return super().all_reduce(tensors)


class Peers:
    """`size` replicas of the module that `make` builds; `each` runs a body on all of them, in threads."""

    def __init__(self, size: int, make: Callable[[], nn.Module]) -> None:
        self.size = size
        self.meeting = _Meeting(size)
        self.collectives = [Counted(self.meeting, r) for r in range(size)]
        module = make()
        self.replicas = [Replica(copy.deepcopy(module), r, size) for r in range(size)]

    def each(self, body: Callable[[Replica, Counted], Any]) -> list[Any]:
        """What the body returned or raised, by rank."""
        found: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            with self.meeting.turn:
                try:
                    found[rank] = body(self.replicas[rank], self.collectives[rank])
                except (PeerFailed, CollectiveError) as error:
                    found[rank] = error
                except BaseException as error:
                    found[rank] = error
                    with self.meeting.changed:
                        self.meeting.stopped = f"rank {rank}: {error!r}"
                        self.meeting.changed.notify_all()

        threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, PeerFailed | CollectiveError):
                raise error
        return found

    def reduce(self, commit: bool = True) -> list[Any]:
        """Reduce on all ranks."""

        def body(replica: Replica, collective: Counted) -> None:
            replica.reduce(collective, STAMP)
            if commit:
                replica.committed()

        return self.each(body)

    def values(self, name: str) -> list[Tensor]:
        """A buffer on each rank."""
        return [r.buffers[name].clone() for r in self.replicas]


def add_gradient(replica: Replica, value: float) -> None:
    """A backward that adds `value` to every gradient."""
    replica.buckets.begin_local()
    sum(p.sum() for p in replica.parameters.values()).mul(value).backward()  # type: ignore[union-attr]


def gradients(peers: Peers) -> list[list[float] | None]:
    found = [r.parameters["weight"].grad for r in peers.replicas]
    return [None if g is None else g.flatten().tolist() for g in found]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False)


class Holder(nn.Module):
    """Holds one buffer `b`, and a parameter."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("b", value)


# ---- the tail


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("field", ["generation", "position", "command"])
@pytest.mark.parametrize("through", ["reduce", "agree"])
def test_ranks_at_different_commands_all_raise(size: int, field: str, through: str) -> None:
    """Rank r is at number r, so that the number of a rank in the middle equals the mean."""
    peers = Peers(size, linear)

    def body(replica: Replica, collective: Counted) -> None:
        stamp = Stamp(**{"generation": 4, "position": 4, "command": 4, field: replica.rank})
        add_gradient(replica, 1.0)
        replica.reduce(collective, stamp) if through == "reduce" else agree(collective, stamp)

    for rank, error in enumerate(peers.each(body)):
        assert isinstance(error, CollectiveError)
        assert f"rank {rank} of {size} is at" in str(error)


@pytest.mark.parametrize("failed", [(0,), (2,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("through", ["reduce", "agree"])
def test_a_failed_rank_is_known_to_all(failed: tuple[int, ...], through: str) -> None:
    peers = Peers(3, linear)

    def body(replica: Replica, collective: Counted) -> None:
        add_gradient(replica, 1.0)
        flag = replica.rank in failed
        replica.reduce(collective, STAMP, flag) if through == "reduce" else agree(collective, STAMP, flag)

    errors = peers.each(body)
    assert all(isinstance(e, PeerFailed) and e.ranks == failed for e in errors)


def test_a_failure_is_told_before_a_difference() -> None:
    peers = Peers(2, linear)
    errors = peers.each(lambda r, c: r.reduce(c, Stamp(1, 1, r.rank), failed=r.rank == 1))
    assert [type(e) for e in errors] == [PeerFailed, PeerFailed]


def test_one_rank_has_nobody_to_agree_with() -> None:
    replica = Replica(linear(), 0, 1)
    add_gradient(replica, 2.0)
    agree(Solo(), STAMP, failed=True)
    replica.reduce(Solo(), STAMP)
    assert replica.parameters["weight"].grad is not None
    assert replica.parameters["weight"].grad.tolist() == [[2.0, 2.0]]
    assert not replica.buckets.pending


# ---- gradients


def test_gradients_are_summed_once() -> None:
    peers = Peers(3, linear)
    peers.each(lambda r, c: add_gradient(r, r.rank + 1.0))
    peers.reduce()
    assert gradients(peers) == [[6.0, 6.0]] * 3
    peers.each(lambda r, c: add_gradient(r, 10.0))
    peers.reduce()
    assert gradients(peers) == [[36.0, 36.0]] * 3


def test_a_reduction_without_a_backward_leaves_gradients_alone() -> None:
    """A training forward alone, or a second commit: the sum of sums would be three times too large."""
    peers = Peers(3, linear)
    peers.each(lambda r, c: add_gradient(r, 1.0))
    peers.reduce()
    before = peers.collectives[0].num_summed
    peers.each(lambda r, c: r.note_rows(1 / 3))
    peers.reduce()
    assert gradients(peers) == [[3.0, 3.0]] * 3
    assert peers.collectives[0].num_summed - before == 5 * 3 + 1  # the tail, and none of the gradients
    peers.each(lambda r, c: add_gradient(r, 1.0))
    peers.reduce()
    assert gradients(peers) == [[6.0, 6.0]] * 3


def test_the_gradient_is_none_on_all_or_on_none() -> None:
    peers = Peers(2, linear)
    peers.each(lambda r, c: add_gradient(r, 2.0) if r.rank else r.buckets.begin_local())
    peers.reduce()
    assert gradients(peers) == [[2.0, 2.0]] * 2
    peers.each(lambda r, c: r.buckets.zero(["weight"], to_none=True))
    peers.each(lambda r, c: r.buckets.begin_local())
    peers.reduce()
    assert gradients(peers) == [None, None]


@pytest.mark.parametrize("failed", [0, 1])
def test_undo_after_a_peer_failed_before_its_backward(failed: int) -> None:
    """The failed rank takes part in the sum of the others without a gradient of its own, and forgets it."""
    peers = Peers(2, linear)
    peers.each(lambda r, c: add_gradient(r, 1.0))
    peers.reduce()

    def fail(replica: Replica, collective: Counted) -> None:
        if replica.rank == failed:
            replica.buckets.pending = True
        else:
            add_gradient(replica, 100.0)
        replica.reduce(collective, STAMP, failed=replica.rank == failed)

    assert [type(e) for e in peers.each(fail)] == [PeerFailed, PeerFailed]
    peers.each(lambda r, c: r.undo())
    assert gradients(peers) == [[2.0, 2.0]] * 2
    peers.each(lambda r, c: add_gradient(r, 1.0))
    peers.reduce()
    assert gradients(peers) == [[4.0, 4.0]] * 2


# ---- buffers


def train(value: Callable[[Replica], Any], weights: list[float] | None = None) -> Callable[[Replica, Counted], None]:
    """A training forward that leaves `value` in the buffer `b` of each replica."""

    def body(replica: Replica, collective: Counted) -> None:
        with torch.no_grad():
            replica.buffers["b"].copy_(torch.as_tensor(value(replica)))
        replica.note_rows(weights[replica.rank] if weights else 1 / replica.size)

    return body


def leveled(start: Tensor, values: list[Any], weights: list[float] | None = None) -> Tensor:
    """The buffer after a reduction; equal on all ranks, to the bit."""
    peers = Peers(len(values), lambda: Holder(start.clone()))
    peers.each(train(lambda r: values[r.rank], weights))
    assert peers.reduce() == [None] * len(values)
    first, *others = peers.values("b")
    assert first.dtype == start.dtype
    assert first.shape == start.shape
    raw = [t.reshape(-1).view(torch.uint8) for t in (first, *others)]
    assert all(torch.equal(raw[0], other) for other in raw[1:])
    return first


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_floats_are_weighted_by_rows(dtype: torch.dtype) -> None:
    start = torch.zeros(2, dtype=dtype)
    assert leveled(start, [[4.0, 0.0], [8.0, 8.0]]).tolist() == [6.0, 4.0]
    assert leveled(start, [[4.0, 0.0], [8.0, 8.0]], [0.75, 0.25]).tolist() == [5.0, 2.0]
    assert leveled(start, [[4.0, 0.0], [8.0, 8.0]], [0.375, 0.125]).tolist() == [5.0, 2.0]  # shares of what was run
    assert leveled(start, [[0.0, 0.0], [8.0, 8.0]], [0.0, 1.0]).tolist() == [8.0, 8.0]
    assert leveled(start, [[4.0, 2.0], [8.0, 8.0]], [0.0, 0.0]).tolist() == [6.0, 5.0]


def test_equal_floats_stay_to_the_bit() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    found = leveled(torch.zeros(1000), [values] * 3, [0.1, 0.2, 0.7])
    assert torch.equal(found.view(torch.int32), values.view(torch.int32))


def test_infinities_give_no_nan() -> None:
    mask = torch.full((3, 3), float("-inf")).triu(1)
    changed = mask.clone()
    changed[2, 0] = 5.0
    assert torch.equal(
        leveled(mask, [changed, mask], [0.5, 0.5]), mask + torch.tensor([[0, 0, 0], [0, 0, 0], [2.5, 0, 0]])
    )


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
def test_integers_become_their_maximum(dtype: torch.dtype) -> None:
    assert leveled(torch.zeros(3, dtype=dtype), [[1, 5, 0], [2, 3, 0]], [0.9, 0.1]).tolist() == [2, 5, 0]


def test_a_large_integer_is_exact() -> None:
    assert leveled(torch.tensor(0), [2**60 + 1, 2**60]).item() == 2**60 + 1


def test_bools_are_true_where_one_is() -> None:
    start = torch.zeros(3, dtype=torch.bool)
    assert leveled(start, [[True, False, False], [False, True, False]]).tolist() == [True, True, False]


def test_eight_bit_floats() -> None:
    start = torch.zeros(2, dtype=torch.float8_e4m3fn)
    assert leveled(start, [[2.0, 1.0], [4.0, 1.0]]).to(torch.float32).tolist() == [3.0, 1.0]


def test_shapes_and_layouts() -> None:
    assert leveled(torch.tensor(0.0), [1.0, 2.0]).item() == 1.5
    start = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    a, b = torch.randn(2, 2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).double().float()
    found = leveled(start, [a, b])
    torch.testing.assert_close(found, (a + b) / 2)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_only_what_changed_in_training_travels() -> None:
    peers = Peers(2, lambda: Holder(torch.zeros(2)))
    for r in peers.replicas:
        r.buffers["b"].add_(r.rank)  # without a training forward: nobody looks at it
    peers.reduce()
    assert [b.tolist() for b in peers.values("b")] == [[0.0, 0.0], [1.0, 1.0]]


def test_the_mean_of_a_step_is_not_weighted_by_the_steps_before() -> None:
    peers = Peers(2, lambda: Holder(torch.zeros(1)))
    peers.each(train(lambda r: 4.0, [1.0, 0.0]))
    peers.reduce()
    peers.each(train(lambda r: 4.0 + r.rank, [0.5, 0.5]))
    peers.reduce()
    assert [b.item() for b in peers.values("b")] == [4.5, 4.5]


def test_batch_norm_has_the_statistics_of_all_rows() -> None:
    """Equal shards: the mean of running means is the running mean of the batch; the variance is that within shards."""
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    peers = Peers(2, lambda: nn.BatchNorm1d(3).double())

    def forward(replica: Replica, collective: Counted) -> None:
        replica.module(x[4 * replica.rank : 4 * replica.rank + 4])
        replica.note_rows(0.5)

    peers.each(forward)
    peers.reduce()
    for replica in peers.replicas:
        torch.testing.assert_close(replica.buffers["running_mean"], 0.1 * x.mean(0))
        within = (x[:4].var(0) + x[4:].var(0)) / 2
        torch.testing.assert_close(replica.buffers["running_var"], 0.9 + 0.1 * within)
        assert replica.buffers["num_batches_tracked"].item() == 1


def test_a_graph_that_waits_survives() -> None:
    """Running statistics are written without a counted change, as batch norm itself does."""
    peers = Peers(2, lambda: nn.BatchNorm1d(3))

    def body(replica: Replica, collective: Counted) -> None:
        out = replica.module(torch.randn(4, 3) + replica.rank)
        replica.note_rows(0.5)
        replica.reduce(collective, STAMP)
        replica.buckets.begin_local()
        out.square().sum().backward()

    assert peers.each(body) == [None, None]


def test_undo_puts_buffers_back() -> None:
    peers = Peers(2, lambda: Holder(torch.tensor([1.0, float("-inf")])))
    peers.each(train(lambda r: [r.rank + 5.0, 0.0]))
    peers.each(lambda r, c: r.undo())
    assert [b.tolist() for b in peers.values("b")] == [[1.0, float("-inf")]] * 2
    assert not any(r.trained or r.weight for r in peers.replicas)
    peers.each(train(lambda r: [r.rank + 5.0, 0.0]))
    peers.reduce()
    peers.each(train(lambda r: [0.0, 0.0]))
    peers.each(lambda r, c: r.undo())
    assert [b.tolist() for b in peers.values("b")] == [[5.5, 0.0]] * 2


def test_undo_with_a_buffer_that_cannot_be_written_to() -> None:
    replica = Replica(Holder(torch.ones(3).expand(2, 3)), 0, 1)
    replica.undo()
    assert replica.buffers["b"].tolist() == [[1.0] * 3] * 2


def test_a_buffer_that_the_module_assigns_anew() -> None:
    peers = Peers(2, lambda: Holder(torch.zeros(1)))

    def forward(replica: Replica, collective: Counted) -> None:
        replica.module.b = replica.buffers["b"] + replica.rank + 1
        replica.note_rows(0.5)

    peers.each(forward)
    peers.reduce()
    assert [b.item() for b in peers.values("b")] == [1.5, 1.5]


def test_a_module_without_parameters_or_without_buffers() -> None:
    peers = Peers(2, lambda: nn.BatchNorm1d(1, affine=False))
    assert peers.replicas[0].device.type == "cpu"
    peers.each(lambda r, c: r.note_rows(0.5 + 0 * float(r.module(torch.tensor([[1.0], [3.0 + 4 * r.rank]])).sum())))
    peers.reduce()
    assert [b.item() for b in peers.values("running_mean")] == [pytest.approx(0.3)] * 2
    assert Replica(nn.BatchNorm1d(1, affine=False, device="meta"), 0, 1).device.type == "meta"
    assert Peers(2, nn.Identity).reduce() == [None, None]


def test_named_tensors() -> None:
    replica = Replica(nn.BatchNorm1d(2), 0, 1)
    found = named_tensors(replica, ["running_var", "weight"])
    assert list(found) == ["running_var", "weight"]
    assert found["weight"] is replica.parameters["weight"]
    assert found["running_var"] is replica.module.running_var

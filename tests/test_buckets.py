"""Gradients in buckets: two ranks in one process, whose sums are made by hand when both have come."""

import pytest
import torch
from torch import nn

from torchdl_ray import buckets as module
from torchdl_ray.buckets import Buckets
from torchdl_ray.errors import UnsupportedError


class Sums:
    """Collects what each rank starts; `wait` of the last rank adds up, in place."""

    def __init__(self, size=2):
        self.size, self.started = size, [[] for _ in range(size)]

    def of(self, rank):
        def start(tensors):
            self.started[rank].append(list(tensors))
            return self

        return start

    def wait(self):
        pass

    def add(self):
        """Sum operation by operation; all ranks must have started the same ones."""
        assert len({len(mine) for mine in self.started}) == 1
        for operation in zip(*self.started, strict=True):
            for parts in zip(*operation, strict=True):
                total = torch.stack([p.clone() for p in parts]).sum(0)
                for p in parts:
                    p.copy_(total)
        self.started = [[] for _ in range(self.size)]


class Rank:
    def __init__(self, net, rank):
        self.net, self.rank = net, rank
        self.buckets = Buckets(dict(net.named_parameters()), rank)

    def grads(self):
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.net.named_parameters()}


def pair(make):
    torch.manual_seed(0)
    first = make()
    torch.manual_seed(0)
    return Rank(first, 0), Rank(make(), 1)


def reduce(ranks, sums=None):
    sums = sums or Sums()
    tails = []
    for rank in ranks:
        tail = torch.zeros(8, dtype=torch.float64)
        flags = [float(here) for here in rank.buckets.present.values()]
        tail = torch.tensor([1.0, *flags], dtype=torch.float64)
        rank.buckets.finish(sums.of(rank.rank), tail)
        tails.append(tail)
    sums.add()
    for rank, tail in zip(ranks, tails, strict=True):
        assert tail[0] == len(ranks)
        rank.buckets.settle(n > 0 for n in tail[1:].tolist())
        rank.buckets.committed()


def backward(rank, x):
    rank.buckets.begin_local()
    rank.net(x).sum().backward()


class Two(nn.Module):
    """Two heads, of which a batch uses one."""

    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        head = self.a if x.mean() > 0 else self.b
        return head(torch.relu(self.body(x)))


def plain_grads(make, *batches):
    torch.manual_seed(0)
    net = make()
    for x in batches:
        net(x).sum().backward()
    return {n: p.grad for n, p in net.named_parameters()}


def same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(found[name], grad, **tolerance, msg=name)
            assert found[name].stride() == grad.stride() or grad.numel() == 1, name


def test_a_head_used_on_one_rank_only_and_one_used_nowhere():
    ranks = pair(Two)
    for rank in ranks:
        backward(rank, torch.ones(2, 3))
    reduce(ranks)
    for rank in ranks:
        same(rank.grads(), plain_grads(Two, torch.ones(2, 3), torch.ones(2, 3)))
        assert rank.net.b.weight.grad is None
        rank.buckets.zero(list(rank.buckets.parameters), to_none=True)
    backward(ranks[0], torch.ones(2, 3))
    backward(ranks[1], -torch.ones(2, 3))
    reduce(ranks)
    for rank in ranks:
        same(rank.grads(), plain_grads(Two, torch.ones(2, 3), -torch.ones(2, 3)))


def test_rank_0_keeps_the_sum_so_that_it_counts_once():
    """w x, dw = x: 1 + 2 after the first reduction, 3 + (3 + 3) after the second without zero_grad: 9, not 12."""
    ranks = pair(lambda: nn.Linear(1, 1, bias=False))
    backward(ranks[0], torch.tensor([[1.0]]))
    backward(ranks[1], torch.tensor([[2.0]]))
    reduce(ranks)
    assert [r.net.weight.grad.item() for r in ranks] == [3, 3]
    backward(ranks[0], torch.tensor([[3.0]]))
    backward(ranks[1], torch.tensor([[3.0]]))
    reduce(ranks)
    assert [r.net.weight.grad.item() for r in ranks] == [9, 9]


def test_zero_without_none_and_gradients_of_the_driver():
    ranks = pair(lambda: nn.Linear(1, 1, bias=False))
    for rank in ranks:
        backward(rank, torch.tensor([[1.0]]))
    reduce(ranks)
    for rank in ranks:
        rank.buckets.zero(["weight"], to_none=False)
        rank.buckets.begin_local()
    ranks[0].buckets.add("weight", torch.tensor([[5.0]]))
    reduce(ranks)
    assert [r.net.weight.grad.item() for r in ranks] == [5, 5]


@pytest.mark.parametrize("zeroed", [None, True, False], ids=["kept", "none", "zeros"])
def test_undo(zeroed):
    ranks = pair(Two)
    for rank in ranks:
        backward(rank, torch.ones(2, 3))
    reduce(ranks)
    before = ranks[1].grads()
    for rank in ranks:
        if zeroed is not None:
            rank.buckets.zero(list(rank.buckets.parameters), to_none=zeroed)
        backward(rank, -torch.ones(2, 3))
        rank.buckets.undo()
        if zeroed is True:  # their memory was used again
            assert all(grad is None for grad in rank.grads().values())
        else:
            same(rank.grads(), before)
        assert not rank.buckets.pending


def test_undo_of_a_part():
    """zero_grad of one optimizer of two leaves the other's gradients, and those come back."""
    ranks = pair(Two)
    for rank in ranks:
        backward(rank, torch.ones(2, 3))
    reduce(ranks)
    before = ranks[0].grads()
    ranks[0].buckets.zero(["a.weight", "a.bias"], to_none=True)
    backward(ranks[0], torch.ones(2, 3))
    ranks[0].buckets.undo()
    same(ranks[0].grads(), before)


class Strides(nn.Module):
    """A channels-last convolution, a transposed weight, a 0-dim parameter, two precisions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.small = nn.Parameter(torch.randn(5, 2, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x):
        x = self.conv(x).mean((2, 3)) @ self.turned * self.scale
        return (x.to(torch.bfloat16) @ self.small).float()


def test_strides_precisions_and_a_parameter_without_dimensions():
    ranks = pair(Strides)
    torch.manual_seed(1)
    x = torch.randn(2, 3, 4, 4)
    for rank in ranks:
        backward(rank, x)
        assert len(rank.buckets.buckets) == 2  # one per dtype
    reduce(ranks)
    for rank in ranks:
        same(rank.grads(), plain_grads(Strides, x, x), rtol=1e-2, atol=1e-3)
        assert rank.net.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
        assert rank.net.frozen.grad is None


def test_armed_sums_start_while_backward_runs(monkeypatch):
    monkeypatch.setattr(module, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(module, "BUCKET_BYTES", 1)
    ranks = pair(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    sums = Sums()
    for rank in ranks:
        assert [b.names for b in rank.buckets.buckets] == [["1.bias"], ["1.weight"], ["0.bias"], ["0.weight"]]
        rank.buckets.arm(sums.of(rank.rank))
        backward(rank, torch.ones(2, 3))
        assert len(sums.started[rank.rank]) == 3  # the last one waits for the tail
    reduce(ranks, sums)
    expected = plain_grads(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), *[torch.ones(2, 3)] * 2)
    for rank in ranks:
        same(rank.grads(), expected)


def test_the_layout_is_fixed_by_registration(monkeypatch):
    monkeypatch.setattr(module, "FIRST_BUCKET_BYTES", 40)
    monkeypatch.setattr(module, "BUCKET_BYTES", 80)
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    assert [b.names for b in Buckets(dict(net.named_parameters()), 0).buckets] == [
        ["3.bias", "3.weight"],
        ["2.bias", "2.weight", "1.bias", "1.weight"],
        ["0.bias", "0.weight"],
    ]


def test_tied_parameters_are_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    ranks = pair(Tied)
    sums = Sums()
    for rank in ranks:
        rank.buckets.arm(sums.of(rank.rank))
        backward(rank, torch.ones(2, 3))
    reduce(ranks, sums)
    for rank in ranks:
        same(rank.grads(), plain_grads(Tied, torch.ones(2, 3), torch.ones(2, 3)))


def test_a_gradient_that_changes_after_its_sum_began_is_refused(monkeypatch):
    """Reentrant checkpointing of tied weights does that."""
    from torch.utils.checkpoint import checkpoint

    monkeypatch.setattr(module, "FIRST_BUCKET_BYTES", 1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.tied = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.tied, x, use_reentrant=True)
            return x

    rank = Rank(Net(), 0)
    rank.buckets.arm(Sums().of(0))
    with pytest.raises(UnsupportedError, match=r"'tied\.(weight|bias)'.*use_reentrant=False"):
        backward(rank, torch.ones(2, 3, requires_grad=True))


def test_a_sparse_gradient_is_refused_by_name():
    rank = Rank(nn.Sequential(nn.Embedding(5, 2, sparse=True)), 0)
    with pytest.raises(UnsupportedError, match=r"'0\.weight' is sparse.*sparse=False"):
        backward(rank, torch.tensor([1, 2]))


def test_freezing_moves_gradients_along():
    ranks = pair(Two)
    for rank in ranks:
        backward(rank, torch.ones(2, 3))
    reduce(ranks)
    before = ranks[0].grads()
    for rank in ranks:
        rank.net.body.requires_grad_(False)
        rank.buckets.rebuild()
        same(rank.grads(), before)
        rank.buckets.zero(list(rank.buckets.parameters), to_none=True)
        backward(rank, torch.ones(2, 3))
    reduce(ranks)
    for rank in ranks:
        assert rank.net.body.weight.grad is None
        same({"a.bias": rank.net.a.bias.grad}, {"a.bias": torch.tensor([4.0, 4.0])})

"""Loss and gradients equal those of one process on the whole batch. Expected: arithmetic on paper, plain PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchdl_ray import DataParallel

WORKERS = [1, 2, 4]


def local(module, workers, **options):
    return DataParallel(module, workers, backend="local", timeout_s=30, **options)


class Slope(nn.Module):
    """y = w x with its own loss."""

    def __init__(self, loss):
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.w * x, y)


class Classifier(nn.Module):
    """Logits and, given targets, the loss; targets of -100 do not count."""

    def __init__(self, features=6, classes=5):
        super().__init__()
        self.hidden = nn.Linear(features, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, x, targets=None):
        logits = self.head(torch.tanh(self.hidden(x)))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def assert_same_gradients(model, plain, tolerance=1e-10):
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
        else:
            assert torch.allclose(torch.as_tensor(ours.grad.clone()), theirs.grad, rtol=0, atol=tolerance), name


def steps(model, optimizer, batches, loss_of):
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("workers", WORKERS)
def test_mean_loss_on_uneven_shards(workers):
    """dL/dw of mean((w x - y)^2) at w = 0, x = 1, y = 1..5 is -2 * mean(y) = -6."""
    with local(Slope(F.mse_loss), workers) as model:
        loss = model(torch.ones(5, dtype=torch.float64), torch.arange(1.0, 6.0, dtype=torch.float64))
        loss.backward()
        assert float(model.module.w.grad) == pytest.approx(-6.0, abs=1e-12)
        assert float(loss) == pytest.approx(11.0, abs=1e-12)  # mean of 1, 4, 9, 16, 25


@pytest.mark.parametrize("workers", [1, 2, 4, 5])
def test_sum_loss(workers):
    """The same with a sum: -2 * sum(y) = -30, and the loss is 55."""
    with local(Slope(nn.MSELoss(reduction="sum")), workers, reduction="sum") as model:
        loss = model(torch.ones(5, dtype=torch.float64), torch.arange(1.0, 6.0, dtype=torch.float64))
        loss.backward()
        assert float(model.module.w.grad) == pytest.approx(-30.0, abs=1e-12)
        assert float(loss) == pytest.approx(55.0, abs=1e-12)


@pytest.mark.parametrize(("rows", "workers"), [(13, 2), (9, 8), (17, 8), (3, 4), (1, 4)])
def test_any_batch_size(rows, workers):
    torch.manual_seed(0)
    plain = Classifier().double()
    x, y = torch.randn(rows, 6, dtype=torch.float64), torch.randint(0, 5, (rows,))
    with local(copy.deepcopy(plain), workers) as model:
        logits, loss = model(x, targets=y)
        model.backward()
        expected_logits, expected = plain(x, targets=y)
        expected.backward()
        assert torch.allclose(logits.fetch(), expected_logits, atol=1e-12)
        assert float(loss) == pytest.approx(float(expected), abs=1e-12)
        assert_same_gradients(model, plain)


def valid_tokens(x, targets=None):
    return (targets != -100).sum(-1)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("microbatch_size", [None, 1, 2])
def test_token_weights(workers, microbatch_size):
    """Rows with unequal numbers of valid tokens; without weights the mean of means would be wrong."""
    torch.manual_seed(1)
    plain = Classifier().double()
    x, y = torch.randn(6, 7, 6, dtype=torch.float64), torch.randint(0, 5, (6, 7))
    y[0, 1:] = -100
    y[3, 3:] = -100
    y[4:] = -100  # a worker without a valid target
    with local(copy.deepcopy(plain), workers, loss_weight=valid_tokens, microbatch_size=microbatch_size) as model:
        _, loss = model(x, targets=y)
        loss.backward()
        _, expected = plain(x, targets=y)
        expected.backward()
        assert float(loss) == pytest.approx(float(expected), abs=1e-12)
        assert_same_gradients(model, plain)


def test_token_counts_on_paper():
    """One token of loss 4 and nine of loss 1: the mean is 1.3."""

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, losses, valid):
            return (self.w * losses * valid).sum() / valid.sum()

    losses = torch.tensor([[4.0] + [9.0] * 8, [1.0] * 9], dtype=torch.float64)
    valid = torch.ones(2, 9, dtype=torch.float64)
    valid[0, 1:] = 0
    with local(Given(), 2, loss_weight=lambda losses, valid: valid.sum(1)) as model:
        loss = model(losses, valid)
        loss.backward()
        assert float(loss) == pytest.approx(1.3, abs=1e-12)
        assert float(model.module.w.grad) == pytest.approx(1.3, abs=1e-12)


@pytest.mark.parametrize("workers", WORKERS)
def test_accumulation(workers):
    """Five microbatches with a step every two: three steps, the third on the tail alone."""
    torch.manual_seed(2)
    plain = Classifier().double()
    batches = [(torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 5, (5,))) for _ in range(5)]
    with local(copy.deepcopy(plain), workers) as model:
        for module in (model, plain):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            num_steps = 0
            for i, (x, y) in enumerate(batches):
                (module(x, targets=y)[1] / 2).backward()
                if i % 2 == 1 or i == len(batches) - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    num_steps += 1
            assert num_steps == 3
        for name, value in plain.state_dict().items():
            assert torch.allclose(model.state_dict()[name], value, atol=1e-12, rtol=0), name


@pytest.mark.parametrize("clip", ["ours", "stock"])
def test_clipping_acts_on_the_reduced_gradient(clip):
    """Gradients of +6 and -2 on two workers: the global one is their sum by weight, (6 - 2) / 2 = 2, clipped to 1."""

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, slope):
            return (self.w * slope).mean()

    with local(Linear(), 2) as model:
        model(torch.tensor([6.0, -2.0], dtype=torch.float64)).backward()
        if clip == "ours":
            norm = model.clip_grad_norm_(1.0)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert float(norm) == pytest.approx(2.0)
        assert float(model.module.w.grad) == pytest.approx(1.0, abs=1e-5)


class TwoHeads(nn.Module):
    """A head that rows with a negative first feature alone use, and one that nobody does."""

    def __init__(self):
        super().__init__()
        self.trunk, self.rare, self.never = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        rows = h[x[:, 0] < 0]
        total = h.square().sum()
        if len(rows):
            total = total + self.rare(rows).square().sum()
        return total


@pytest.mark.parametrize("workers", WORKERS)
def test_heads_used_on_some_workers_or_nowhere(workers):
    torch.manual_seed(3)
    plain = TwoHeads().double()
    x = torch.randn(8, 4, dtype=torch.float64).abs()
    x[0, 0] = -1.0  # only the first shard uses the head
    with local(copy.deepcopy(plain), workers, reduction="sum") as model:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in (model, plain)]
        before = plain.never.weight.detach().clone()
        for _ in range(3):
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                module(x).backward()
            assert_same_gradients(model, plain)
            for optimizer in optimizers:
                optimizer.step()
        for name, value in model.state_dict().items():
            assert torch.allclose(value, plain.state_dict()[name], atol=1e-10, rtol=0), name
        assert torch.equal(model.state_dict()["never.weight"], before)


@pytest.mark.parametrize("workers", WORKERS)
def test_freeze_and_unfreeze(workers):
    torch.manual_seed(4)
    plain = Classifier().double()
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.randint(0, 5, (7,))
    with local(copy.deepcopy(plain), workers) as model:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
        for step in range(6):
            for module, optimizer in zip((model.module, plain), optimizers, strict=True):
                for p in module.hidden.parameters():
                    p.requires_grad_(step in (2, 3))
                optimizer.zero_grad()
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                module(x, targets=y)[1].backward()
                optimizer.step()
        for name, value in model.state_dict().items():
            assert torch.allclose(value, plain.state_dict()[name], atol=1e-12, rtol=0), name


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return F.cross_entropy(self.out(self.embed(x)).flatten(0, 1), x.flatten())


@pytest.mark.parametrize("workers", WORKERS)
def test_tied_weights(workers):
    torch.manual_seed(5)
    plain = Tied().double()
    x = torch.randint(0, 11, (6, 3))
    with local(copy.deepcopy(plain), workers) as model:
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain)]
        for _ in range(3):
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                module(x).backward()
                optimizer.step()
        assert all(model.run(lambda m: m.out.weight is m.embed.weight))
        assert model.module.out.weight is model.module.embed.weight
        assert len(optimizers[0].state_dict()["state"]) == 1
        state = model.state_dict()
        assert torch.allclose(state["out.weight"], plain.out.weight, atol=1e-12)
        model.load_state_dict(plain.state_dict())
        assert all(model.run(lambda m: m.out.weight is m.embed.weight))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_one_worker_is_bit_identical(name, digits):
    """Losses, weights and optimizer state after 20 steps in float32."""
    x, y = digits.tensors
    x = x.flatten(1)
    torch.manual_seed(6)
    plain = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    arguments = {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}[name]
    batches = [(x[i * 32 : i * 32 + 32], y[i * 32 : i * 32 + 32]) for i in range(20)]
    with local(copy.deepcopy(plain), 1) as model:
        found = []
        for module in (model, plain):
            optimizer = getattr(torch.optim, name)(module.parameters(), **arguments)
            losses = steps(module, optimizer, batches, lambda m, x, y: F.cross_entropy(m(x), y))
            found.append((losses, module.state_dict(), optimizer.state_dict()))
        assert found[0][0] == found[1][0]
        for key, value in found[1][1].items():
            assert torch.equal(found[0][1][key], value), key
        for number, state in found[1][2]["state"].items():
            for key, value in state.items():
                ours = found[0][2]["state"][number][key]
                assert torch.equal(ours, value) if isinstance(value, torch.Tensor) else ours == value, key


@pytest.mark.parametrize("workers", [2, 4])
def test_many_workers_in_float64(workers, digits):
    """20 steps within 1e-10 of one process, and all replicas bit-identical to each other."""
    x, y = digits.tensors
    x = x.flatten(1)
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    batches = [(x[i * 30 : i * 30 + 30 - i % 3].double(), y[i * 30 : i * 30 + 30 - i % 3]) for i in range(20)]
    with local(copy.deepcopy(plain), workers) as model:
        found = []
        for module in (model, plain):
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
            found.append(steps(module, optimizer, batches, lambda m, x, y: F.cross_entropy(m(x), y)))
        assert found[0] == pytest.approx(found[1], abs=1e-10)
        for key, value in plain.state_dict().items():
            assert torch.allclose(model.state_dict()[key], value, rtol=0, atol=1e-10), key
        assert len(set(model.check_sync())) == 1


def test_workers_start_equal_whatever_their_own_seeds():
    with local(nn.Linear(3, 2), 4) as model:
        model.run(lambda m: torch.manual_seed(torch.randint(0, 1 << 30, ()).item()) and None)
        assert len(set(model.check_sync())) == 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(6, 3)).sum().backward()
        optimizer.step()
        assert len(set(model.check_sync())) == 1


@pytest.mark.parametrize("workers", [2, 4])
def test_buffers_are_equal_at_evaluation_and_in_checkpoints(workers):
    torch.manual_seed(8)
    with local(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), workers) as model:
        x = torch.randn(4 * workers, 3)
        for _ in range(3):
            model(x)  # training forwards without a step
        model.eval()
        expected = copy.deepcopy(model.module).eval()
        assert torch.allclose(model(x).fetch(), expected(x), atol=1e-6)
        state = model.state_dict()
        assert state["1.num_batches_tracked"].dtype == torch.int64
        assert int(state["1.num_batches_tracked"]) == 3
        assert len(set(model.check_sync())) == 1


def test_batch_norm_statistics_are_the_weighted_mean():
    """momentum 1: the running mean is the weighted mean of the shards' means, the mean of the batch."""
    x = torch.arange(10.0, dtype=torch.float64)[:, None]
    with local(nn.BatchNorm1d(1, momentum=1.0).double(), 4) as model:
        model(x)
        assert float(model.state_dict()["running_mean"]) == pytest.approx(4.5)


def test_shards_of_one_row_in_batch_norm_fail_clearly():
    with local(nn.BatchNorm1d(3), 4) as model:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(torch.randn(5, 3)).fetch()
        assert model(torch.randn(8, 3)).shape == (8, 3)  # usable afterwards


def test_dropout_masks_differ_between_workers_and_repeat_on_a_rerun():
    x = torch.ones(4, 64)
    seen = []
    for _ in range(2):
        with local(nn.Dropout(0.5), 4, seed=7) as model:
            seen.append([model(x).fetch().clone() for _ in range(2)])
    first, second = seen
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    rows = [tuple(row.tolist()) for batch in first for row in batch]
    assert len(set(rows)) == 8  # differs between workers and between forwards

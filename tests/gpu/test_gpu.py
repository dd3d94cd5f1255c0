"""On a CUDA device: one worker under NCCL, two workers on halves of one GPU under Gloo. Skipped without a device."""

import copy
import statistics
import time

import pytest
import ray
import torch
import torch.nn.functional as F
from torch import nn

from torchdl_ray import DataParallel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def gpu_ray():
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.Linear(16 * 36, 10)

    def forward(self, x, targets=None):
        logits = self.head(F.relu(self.norm(self.conv(x))).flatten(1))
        return logits, None if targets is None else F.cross_entropy(logits, targets)


def batches(digits, num, rows=64):
    images, labels = digits.tensors
    return [(images[i * rows : (i + 1) * rows], labels[i * rows : (i + 1) * rows]) for i in range(num)]


def train(model, data, device=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        _, loss = model(x.to(device) if device else x, targets=y.to(device) if device else y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def test_one_worker_equals_plain_torch_on_the_same_gpu(digits):
    torch.manual_seed(0)
    plain = Net()
    data = batches(digits, 10)
    with DataParallel(copy.deepcopy(plain), 1, use_gpu=True) as model:
        assert model.run(lambda m: str(m.head.weight.device)) == ["cuda:0"]
        ours = train(model, data)
        plain = plain.cuda()
        expected = train(plain, data, "cuda")
        assert ours == pytest.approx(expected, rel=1e-4)
        assert all(v.device.type == "cpu" for v in model.state_dict().values())


def test_two_workers_on_halves_of_one_gpu(digits):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    images, labels = digits.tensors
    with DataParallel(copy.deepcopy(plain), 2, use_gpu=True, resources_per_worker={"GPU": 0.5, "CPU": 1}) as model:
        results = []
        for module, device in ((model, "cpu"), (plain.cuda(), "cuda")):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            for i in range(5):
                x, y = images[i * 33 : i * 33 + 33].double().to(device), labels[i * 33 : i * 33 + 33].to(device)
                optimizer.zero_grad()
                F.cross_entropy(module(x), y).backward()
                optimizer.step()
            results.append({k: v.cpu() for k, v in module.state_dict().items()})
        for name, value in results[0].items():
            assert torch.allclose(value, results[1][name], atol=1e-9, rtol=0), name
        assert len(set(model.check_sync())) == 1


def test_a_model_that_sits_on_the_gpu_already():
    net = nn.Linear(4, 4).cuda()
    with DataParallel(net, 1, use_gpu=True) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        assert model.module.weight.device.type == "cuda"
        assert torch.equal(model.state_dict()["weight"], model.module.weight.detach().cpu())


def test_autocast_travels(digits):
    with DataParallel(Net(), 1, use_gpu=True) as model:
        x, _ = batches(digits, 1)[0]
        with torch.autocast("cuda", torch.bfloat16):
            logits, _ = model(x)
        assert logits.dtype == torch.bfloat16


class Deep(nn.Module):
    """Sixteen layers of 1024 and a loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])

    def forward(self, x):
        return self.net(x).square().mean()


def step_time(module, x, finish):
    """The median over five rounds of the mean of 20 steps, in seconds."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(20):
            optimizer.zero_grad()
            module(x).backward()
            optimizer.step()
        finish()
        times.append((time.perf_counter() - start) / 20)
    return statistics.median(times)


def test_step_time_and_memory_beside_plain_torch(capsys):
    """Prints figures; asserts only what noise cannot change: at most half as much memory again as plain torch."""
    plain, x = Deep(), torch.randn(512, 1024)
    with DataParallel(copy.deepcopy(plain), 1, use_gpu=True) as model:
        ours = step_time(model, x, lambda: model.run(lambda m: None))
        our_peak = model.run(lambda m: torch.cuda.max_memory_allocated())[0]
    plain, x = plain.cuda(), x.cuda()
    torch.cuda.reset_peak_memory_stats()
    theirs = step_time(plain, x, torch.cuda.synchronize)
    their_peak = torch.cuda.max_memory_allocated()
    with capsys.disabled():
        print(
            f"\nstep {ours * 1e3:.2f} ms beside {theirs * 1e3:.2f}, peak {our_peak >> 20} MiB beside {their_peak >> 20}"
        )
    assert our_peak < 1.5 * their_peak

"""The life of a model on a cluster: where it may be defined, how it shares, how it ends, and what it leaves behind."""

import gc
import os
import subprocess
import sys
import textwrap
import time

import pytest
import ray
import torch
import torch.nn.functional as F
from torch import nn

from torchdl_ray import DataParallel
from torchdl_ray.errors import ArgumentError, PlacementTimeout

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Doubling(nn.Linear):
    """Writes into its input, as some preprocessing does."""

    def forward(self, x):
        return super().forward(x.mul_(2).flatten(1)[:, :4])


class Breaks(nn.Linear):
    """Cannot be built on the workers."""

    def __setstate__(self, state):
        raise ArithmeticError("not here")


def fresh(kind=Net, *args):
    torch.manual_seed(0)
    return kind(*args).double()


def batch(step, rows=8, columns=5):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model, optimizer, steps):
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def free_cpus(wanted, timeout_s=15):
    deadline = time.monotonic() + timeout_s
    while (free := ray.available_resources().get("CPU", 0)) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return free


def gone(pids, timeout_s=15):
    """Whether the processes ended; a zombie has not."""
    deadline = time.monotonic() + timeout_s
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def script(tmp_path, text, timeout_s=100, **environment):
    """Run a script in a process of its own; returns what it printed, and what it said on stderr."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | environment
    env["PYTHONPATH"] = os.getcwd()
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=timeout_s, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


START = """
import ray, torch, os
ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
"""


def test_two_workers_live_and_end(local_ray):
    """One group of workers, looked at from all sides."""
    with DataParallel(fresh(), 2, resources_per_worker={"CPU": 2}) as model:
        pids = [r.pid for r in model.replicas]
        assert "2 workers on 1 node," in repr(model)
        assert model._repr_html_().count("<tr>") == 3
        assert model.run(lambda module: torch.get_num_threads()) == [2, 2]  # a worker with 2 CPUs uses 2 threads

        optimizer = sgd(model.parameters())
        train(model, optimizer, range(2))
        optimizer.param_groups[0]["lr"] = 0.01  # takes effect at the next step
        train(model, optimizer, range(2, 4))
        plain = fresh()
        expected = sgd(plain.parameters())
        train(plain, expected, range(2))
        expected.param_groups[0]["lr"] = 0.01
        train(plain, expected, range(2, 4))
        x, _ = batch(9, rows=7)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(x).fetch(), plain(x), rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(model.module(x), plain(x), rtol=1e-12, atol=1e-13)
        assert not ray.util.list_named_actors(all_namespaces=True)
    assert "closed" in repr(model)
    model.close()  # a second time
    assert gone(pids)
    assert free_cpus(4) == 4
    torch.testing.assert_close(dict(model.module.state_dict()), dict(plain.state_dict()), rtol=1e-12, atol=1e-13)


def test_a_dropped_model_lets_its_workers_go(local_ray):
    model = DataParallel(fresh(), 1)
    pids = [r.pid for r in model.replicas]
    optimizer = sgd(model.parameters())
    train(model, optimizer, range(2))
    del model, optimizer
    gc.collect()
    assert gone(pids)
    assert free_cpus(4) == 4


def test_a_constructor_that_fails_leaves_nothing(local_ray):
    with pytest.raises(ArithmeticError, match="not here"):
        DataParallel(Breaks(4, 3), 2)
    assert free_cpus(4) == 4
    start = time.monotonic()
    with pytest.raises(PlacementTimeout, match="asked for: 9 workers"):
        DataParallel(fresh(), 9)
    assert time.monotonic() - start < 15
    with pytest.raises(ArgumentError, match="num_workers"):
        DataParallel(fresh(), -1)
    assert free_cpus(4) == 4


def test_two_models_side_by_side_and_on_shared_workers(local_ray):
    with (
        DataParallel(fresh(), 2, resources_per_worker={"CPU": 0.5}) as one,
        DataParallel(fresh(Net, 4), 2, resources_per_worker={"CPU": 0.5}) as two,
        DataParallel(fresh(Net, 6), workers=two) as three,
    ):
        plain = [fresh(), fresh(Net, 4), fresh(Net, 6)]
        remote = [one, two, three]
        optimizers = [sgd(m.parameters()) for m in remote]
        expected = [sgd(m.parameters()) for m in plain]
        for step in range(3):
            for k in range(3):
                train(remote[k], optimizers[k], [step])
                train(plain[k], expected[k], [step])
        for k in range(3):
            torch.testing.assert_close(
                dict(remote[k].state_dict()), dict(plain[k].state_dict()), rtol=1e-12, atol=1e-13
            )
        assert {r.pid for r in two.replicas} == {r.pid for r in three.replicas} != {r.pid for r in one.replicas}
    assert free_cpus(4) == 4


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 5)

    def forward(self, z):
        return self.last(torch.relu(self.norm(self.first(z))))


def gan(generator, discriminator, steps):
    """DCGAN's loop: the generator's graph waits while the discriminator steps."""
    first, second = sgd(generator.parameters()), sgd(discriminator.parameters())
    for step in steps:
        torch.manual_seed(step)
        real, z = torch.randn(8, 5).double(), torch.randn(8, 3).double()
        second.zero_grad()
        fake = generator(z)
        error = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        error.backward()
        second.step()
        first.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        first.step()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gan_is_that_of_plain_pytorch(workers):
    """One worker has the whole batch's statistics; with two, the loop runs and the replicas stay equal."""
    plain = fresh(Generator), fresh(nn.Linear, 5, 1)
    gan(*plain, range(3))
    with (
        DataParallel(fresh(Generator), workers, backend="local") as generator,
        DataParallel(fresh(nn.Linear, 5, 1), workers=generator) as discriminator,
    ):
        gan(generator, discriminator, range(3))
        generator.check_sync()
        discriminator.check_sync()
        if workers == 1:
            for remote, local in zip((generator, discriminator), plain, strict=True):
                torch.testing.assert_close(dict(remote.state_dict()), dict(local.state_dict()), rtol=0, atol=0)


@pytest.mark.timeout(300)
def test_inputs_stay_the_drivers_and_the_store_stays_flat(local_ray):
    def used():
        total = ray.cluster_resources()["object_store_memory"]
        return total - ray.available_resources().get("object_store_memory", total)

    with DataParallel(Doubling(4, 3), 2) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        x = torch.ones(8, 262_144)  # 8 MB
        before = None
        for step in range(1000):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            if step == 30:
                before = used()
        model.check_sync()
        assert torch.equal(x, torch.ones(8, 262_144))
        time.sleep(1.5)  # Ray reports once a second
        assert used() <= before + 40e6


def test_four_nodes_work_as_one(ray_cluster):
    ray_cluster([{"num_cpus": 1}] * 4)
    plain = fresh()
    train(plain, sgd(plain.parameters()), range(4))
    with DataParallel(fresh()) as model:  # num_workers=None: all CPUs
        assert len(model.replicas) == 4
        assert "4 workers on 4 nodes" in repr(model)
        train(model, sgd(model.parameters()), range(4))
        model.check_sync()
        several = {k: v.clone() for k, v in model.state_dict().items()}
    with DataParallel(fresh(), 4, backend="local") as local:
        train(local, sgd(local.parameters()), range(4))
        torch.testing.assert_close(several, dict(local.state_dict()), rtol=0, atol=0)  # the same bits
    torch.testing.assert_close(several, dict(plain.state_dict()), rtol=1e-12, atol=1e-13)


def test_a_script_with_its_own_classes(tmp_path):
    """A model of 300 MB from __main__ with a lambda, one from a module beside the script; no close, no GPU."""
    (tmp_path / "beside.py").write_text("from torch import nn\nclass Local(nn.Linear):\n    pass\n")
    out, err = script(
        tmp_path,
        START
        + """
from torchdl_ray import DataParallel
from beside import Local

class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(75_000_000, 1)
        self.last, self.shape = torch.nn.Linear(1, 2), lambda x: x * 2
        self.table.weight.requires_grad_(False)
    def forward(self, x):
        return self.shape(self.last(self.table(x)))

big = DataParallel(Mine(), 2, resources_per_worker={"CPU": 0.5})
assert big(torch.arange(6)).shape == (6, 2)
small = DataParallel(Local(3, 2), 2, resources_per_worker={"CPU": 0.5})
optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
for _ in range(3):
    small(torch.randn(4, 3)).sum().backward()
    optimizer.step()
torch.save(small.state_dict(), os.path.join(os.path.dirname(__file__), "saved.pt"))
small.load_state_dict(torch.load(os.path.join(os.path.dirname(__file__), "saved.pt")))
print("pids", *[r.pid for m in (big, small) for r in m.replicas])
""",
        CUDA_VISIBLE_DEVICES="",
    )
    assert gone([int(pid) for pid in out.split("pids")[1].split()])
    quiet(err)


def quiet(err):
    """Nothing that a user would take for a fault."""
    for word in ("Traceback", "Exception", "Error", "TCPStore", "c10d", "leaked", "resource_tracker", "Warning"):
        assert word not in err, err


def test_a_script_that_fails_shows_its_own_traceback_alone(tmp_path):
    out, err = script(
        tmp_path,
        START
        + """
import sys, traceback
from torchdl_ray import DataParallel

def main():
    model = DataParallel(torch.nn.Linear(3, 2), 2)
    print("pids", *[r.pid for r in model.replicas])
    model(torch.randn(4, 3))
    raise SystemExit(0)

main()
""",
    )
    assert gone([int(pid) for pid in out.split("pids")[1].split()])
    quiet(err)

"""Plain torch.distributed functions run unchanged, and end together."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torchdl_ray.errors import ArgumentError, WaitTimeout, WorkerLost
from torchdl_ray.launch import spawn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")


class Mine(Exception):
    def __init__(self, code, place):
        super().__init__(f"code {code} at {place}")
        self.code = code


def tutorial(rank, world_size, features):
    """The recipe of PyTorch's tutorial, word for word where it sets things up."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(features, 1))
    model(torch.full((2, features), float(rank))).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    return rank, world_size, [p.grad.tolist() for p in model.parameters()]


def without_arguments(rank, world_size):
    dist.init_process_group()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    assert dist.get_rank() == rank
    return total, {name: os.environ.get(name) for name in NAMES}


def fails(rank, world_size, how, pids):
    Path(pids, str(os.getpid())).touch()
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 1:
        if how == "raises":
            raise Mine(5, "sea")
        if how == "exits":
            os._exit(3)
        if how == "leaves first":
            dist.destroy_process_group()
            raise Mine(6, "shore")
        if how == "segfaults":
            os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()  # the others are stuck here


def assert_all_gone(folder):
    pids = [int(path.name) for path in folder.iterdir()]
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return pids


def test_tutorial_runs_unchanged(nothing_left):
    # Inputs are 0 on rank 0 and 1 on rank 1, two rows each: the mean over ranks is 1 per weight, 2 for the bias.
    assert spawn(tutorial, (3,), 2) == [(rank, 2, [[[1.0, 1.0, 1.0]], [2.0]]) for rank in range(2)]


def test_environment_and_tensors(nothing_left):
    results = spawn(without_arguments, num_workers=3, use_gpu=False)
    assert [total.item() for total, _ in results] == [6.0, 6.0, 6.0]
    for rank, (_, environment) in enumerate(results):
        assert environment == dict(zip(NAMES, [str(rank), "3", str(rank), "3", "0", "127.0.0.1", ""], strict=True))


@pytest.mark.parametrize("how", ["raises", "leaves first"])
def test_first_failure_is_raised_and_the_others_end(nothing_left, tmp_path, how):
    with pytest.raises(Mine) as caught:
        spawn(fails, (how, tmp_path), 3)
    assert caught.value.code in (5, 6)
    assert "raised on worker 1 " in caught.value.__notes__[0]
    assert f"{__file__}:" in caught.value.__notes__[0]
    assert "raise Mine(" in str(caught.value.__cause__)
    assert len(assert_all_gone(tmp_path)) == 3


@pytest.mark.parametrize("how", ["exits", "segfaults"])
def test_death_is_named(nothing_left, tmp_path, how):
    with pytest.raises(WorkerLost, match=r"worker 1 \(pid \d+, node [\d.]+\) died") as caught:
        spawn(fails, (how, tmp_path), 3)
    assert any(f"pid {pid}," in str(caught.value) for pid in assert_all_gone(tmp_path))


def test_time_limit(nothing_left, tmp_path):
    def sleeps(rank, world_size):
        Path(tmp_path, str(os.getpid())).touch()
        if rank == 1:
            time.sleep(600)

    with pytest.raises(WaitTimeout, match="still running on rank 1 after 3 s"):
        spawn(sleeps, num_workers=2, timeout_s=3)
    assert_all_gone(tmp_path)


def test_interrupt_ends_all(nothing_left, tmp_path):
    def sleeps(rank, world_size):
        Path(tmp_path, str(os.getpid())).touch()
        time.sleep(600)

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        spawn(sleeps, num_workers=2)
    assert_all_gone(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers is 0"),
        ({"args": "digits"}, r"args is 'digits'; expected a tuple"),
        ({"args": (threading.Lock(),)}, "cannot be pickled"),
        ({"fn": "train"}, "fn is 'train'"),
        ({"args": (1, 2, 3)}, "3 args: too many positional arguments"),
        ({"fn": lambda rank, world_size, epochs: None}, "0 args: missing a required argument: 'epochs'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        spawn(**{"fn": without_arguments, **arguments})


@pytest.mark.slow
def test_several_nodes_and_shared_visibility(ray_cluster):
    ray_cluster([{"num_cpus": 1}, {"num_cpus": 2, "num_gpus": 2}, {"num_cpus": 2, "num_gpus": 2}])
    results = spawn(without_arguments, use_gpu=True)
    assert [total.item() for total, _ in results] == [10.0] * 4
    for rank, (_, environment) in enumerate(results):
        local, node = str(rank % 2), str(rank // 2)
        assert environment.pop("MASTER_ADDR") != "127.0.0.1"
        expected = [str(rank), "4", local, "2", node, "0,1"]
        assert list(environment.values()) == expected


@pytest.mark.slow
def test_example(nothing_left):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, root / "examples" / "ddp_recipe.py"],
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]

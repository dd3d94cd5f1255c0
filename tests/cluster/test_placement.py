"""Reserving devices, explaining why they cannot be had, and starting workers on them."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray

from torchdl_ray.errors import ArgumentError, PlacementError, PlacementTimeout, WaitTimeout, WorkerLost
from torchdl_ray.placement import call, poll, reserve, share, start_ray, wait
from torchdl_ray.resources import Resources, can_grow, fitting, resolve

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


class Greeter:
    def __init__(self, rank, peers=(), value=None):
        if value == "refuse":
            raise KeyError("no such greeting")
        self.rank, self.peers, self.value = rank, peers, value

    def greet(self):
        return self.rank, len(self.peers), self.value

    def threads(self):
        import torch

        return torch.get_num_threads()

    def environment(self, name):
        return os.environ.get(name)

    def die(self):
        os._exit(1)

    def boom(self):
        raise ValueError("boom")

    def sleep(self, seconds):
        time.sleep(seconds)


def table_states():
    return sorted(group["state"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED")


@pytest.mark.parametrize("num_workers", [0, -1, True, 2.0, "2", 1.5])
def test_wrong_number_of_workers(num_workers):
    with pytest.raises(ArgumentError, match="num_workers is "):
        resolve(num_workers)


@pytest.mark.parametrize(
    ("use_gpu", "per_worker", "message"),
    [
        ("yes", None, "use_gpu is 'yes'"),
        (None, [("CPU", 1)], "expected a dict"),
        (None, {"cpu": 1}, "names 'cpu'"),
        (None, {1: 1}, "names 1"),
        (None, {"CPU": -1}, r"resources_per_worker\['CPU'\] is -1"),
        (None, {"CPU": "2"}, "is '2'"),
        (None, {"GPU": True}, "is True"),
        (None, {"memory": float("nan")}, "is nan"),
        (None, {"GPU": 1.5}, "whole devices"),
        (True, {"GPU": 0}, "contradict"),
    ],
)
def test_wrong_resources(use_gpu, per_worker, message):
    with pytest.raises(ArgumentError, match=message):
        resolve(1, use_gpu, per_worker)


def test_resolve_on_cpus(local_ray):
    assert resolve() == Resources(4, False, 1, 0, {})
    assert resolve(3, resources_per_worker={"CPU": 2, "oven": 0.5}) == Resources(3, False, 2, 0, {"oven": 0.5})
    assert resolve(2, True) == Resources(2, True, 1, 1, {})  # waits for GPUs to come
    assert resolve(resources_per_worker={"CPU": 3}).num_workers == 1
    assert fitting(Resources(1, False, 1, 1)) == 0
    assert not can_grow(Resources(9, False, 1, 0))
    with pytest.raises(ArgumentError, match="nothing"):
        resolve(1, resources_per_worker={"CPU": 0})
    with pytest.raises(PlacementError, match=r"no node has 1 CPU, 1 GPU.*4 CPU"):
        resolve(use_gpu=True, timeout_s=0.2)
    assert start_ray() is False


def test_workers_live_and_die(nothing_left):
    reservation = reserve(resolve(3), 30)
    shared = share("hello")
    handles = reservation.create(Greeter, lambda members: [(m.rank, members, shared) for m in members], timeout_s=90)
    members = reservation.members
    assert [m.rank for m in members] == [0, 1, 2]
    assert len({m.pid for m in members}) == 3
    assert all(m.gpu_ids == () and m.cpus == 1 for m in members)
    assert wait([call(h, "greet") for h in handles], 30, "greetings") == [(r, 3, "hello") for r in range(3)]
    with pytest.raises(ValueError, match="boom"):
        wait([call(handles[0], "sleep", 60), call(handles[1], "boom")], 30, "a failure", members)
    with pytest.raises(WaitTimeout, match=r"waited 0.2 s for a sleeper: 1 of 2 workers answered, rank 1 did not"):
        wait([call(handles[1], "greet"), call(handles[2], "sleep", 60)], 0.2, "a sleeper", members)
    lost = rf"worker 1 \(pid {members[1].pid}, node {members[1].node_ip}\) died: .*exit"
    with pytest.raises(WorkerLost, match=lost):
        wait([call(handles[0], "sleep", 60), call(handles[1], "die")], 30, "a death", members)
    assert poll({0: call(handles[2], "sleep", 60)}, 0.05) == {}
    started = time.monotonic()
    reservation.release()
    reservation.release()
    assert time.monotonic() - started < 1.0
    for member in members:
        wait_until_gone(member.pid)


def wait_until_gone(pid):
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_failing_constructor_leaves_nothing(nothing_left):
    reservation = reserve(resolve(2), 30)
    with pytest.raises(KeyError) as caught:
        reservation.create(Greeter, [(0,), (1, (), "refuse")], timeout_s=90, site="train.py:3 in main")
    assert str(caught.value) == "'no such greeting'"
    assert "raised on worker 1" in caught.value.__notes__[0]
    assert "train.py:3 in main" in caught.value.__notes__[0]
    assert 'raise KeyError("no such greeting")' in str(caught.value.__cause__)
    assert table_states() == []


def test_threads(nothing_left, monkeypatch):
    def threads_of(**options):
        reservation = reserve(resolve(1, resources_per_worker={"CPU": 4}), 30)
        handles = reservation.create(Greeter, [(0,)], timeout_s=90, **options)
        try:
            return wait([call(handles[0], "threads")], 60, "threads")[0]
        finally:
            reservation.release()

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of() == 4
    assert threads_of(runtime_env={"env_vars": {"OMP_NUM_THREADS": "3"}}) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")  # `ray job submit` sets 1 by itself
    assert threads_of() == 4


def test_more_than_exists(nothing_left, caplog):
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "torchdl_ray"), pytest.raises(TimeoutError) as caught:
        reserve(resolve(5), 60)
    assert time.monotonic() - started < 12
    text = str(caught.value)
    assert "asked for: 5 workers of 1 CPU each" in text
    assert "have: 4 CPU (4 free) on 1 node" in text
    assert "held by: nobody" in text
    assert "num_workers=4" in text
    assert "asked for: 5 workers" in caplog.text
    assert table_states() == []


def test_held_by_others(nothing_left, caplog):
    @ray.remote(num_cpus=1)
    class Miser:
        def ping(self):
            return os.getpid()

    @ray.remote(num_cpus=1)
    def busy():
        time.sleep(60)

    mine = reserve(resolve(1), 30, name="bakery")
    miser = Miser.options(name="scrooge").remote()
    pid = ray.get(miser.ping.remote())
    task = busy.remote()
    time.sleep(2)
    started = time.monotonic()
    with pytest.raises(PlacementTimeout) as caught:
        reserve(resolve(3), 6)
    assert 6 <= time.monotonic() - started < 8
    text = str(caught.value)
    assert "have: 4 CPU (1 free)" in text
    assert f"actor 'scrooge' of class Miser: 1 CPU, pid {pid}" in text
    assert "placement group 'bakery-" in text
    assert "running tasks: 1 CPU" in text
    assert "(this driver)" in text
    assert "waiting for devices, up to 2 s more" in caplog.text  # said long before the limit
    threading.Timer(1.0, mine.release).start()
    reserve(resolve(2), 20).release()  # has them as soon as they are free
    ray.kill(miser)
    ray.cancel(task, force=True)
    assert table_states() == []


def test_interrupt_leaves_nothing(nothing_left):
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        reserve(resolve(5), 60)
    assert time.monotonic() - started < 3
    assert table_states() == []


def test_release_after_ray_is_gone():
    """At the end of an interpreter, and when somebody else has shut Ray down."""
    program = """
import atexit, logging, ray
from torchdl_ray.placement import reserve, start_ray
from torchdl_ray.resources import resolve
print(start_ray(num_cpus=2), start_ray())
first, second = reserve(resolve(1), 30), reserve(resolve(1), 30)
atexit.register(first.release)
ray.shutdown()
second.release()
print("done")
"""
    environment = {**os.environ, "RAY_ADDRESS": "local", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "done"]
    assert "Traceback" not in done.stderr


def test_ray_client_is_refused(monkeypatch):
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "ray://somewhere:10001")
    with pytest.raises(NotImplementedError, match="Ray Client"):
        start_ray()


@pytest.mark.slow
def test_nodes_with_pretended_gpus(ray_cluster, monkeypatch):
    ray_cluster([{"num_cpus": 1}, {"num_cpus": 2, "num_gpus": 2}, {"num_cpus": 2, "num_gpus": 2}])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a driver that sees no GPU
    assert resolve() == Resources(4, True, 1, 1, {})
    assert resolve(use_gpu=False) == Resources(5, False, 1, 0, {})
    assert resolve(2, resources_per_worker={"GPU": 0}).use_gpu is False
    assert resolve(resources_per_worker={"GPU": 0.5, "CPU": 0.5}).num_workers == 8
    assert resolve(use_gpu=False, resources_per_worker={"GPU": 1}) == Resources(4, False, 1, 1, {})
    reservation = reserve(resolve(use_gpu=False, resources_per_worker={"GPU": 1}), 30)
    handles = reservation.create(Greeter, [(rank,) for rank in range(4)], timeout_s=120)
    members = reservation.members
    assert [m.gpu_ids for m in members] == [("0",), ("1",), ("0",), ("1",)]
    assert members[0].node_id == members[1].node_id != members[2].node_id == members[3].node_id
    visible = wait([call(h, "environment", "CUDA_VISIBLE_DEVICES") for h in handles], 30, "devices")
    assert visible == ["0", "1", "0", "1"]
    with pytest.raises(PlacementTimeout, match=r"have: 5 CPU \(1 free\), 4 GPU \(0 free\) on 3 nodes"):
        reserve(resolve(5), 2)
    reservation.release()

from __future__ import annotations

import pytest
import ray

from torchdl_ray.collective import Rendezvous, host_store

pytestmark = pytest.mark.cluster


@ray.remote(num_cpus=1)
class Member:
    def __init__(self, rank):
        import torch

        torch.set_num_threads(1)
        self.rank = rank

    def join(self, rendezvous, **options):
        from torchdl_ray.collective import join

        self.group = join(rendezvous, self.rank, **options)
        return self.group.kind

    def reduce(self):
        import torch

        vector = torch.full((4,), float(self.rank))
        self.group.all_reduce([vector]).wait()
        self.group.barrier()
        return vector.tolist()

    def use_ray(self, name):
        """Every operation of Ray collective, by the group's name."""
        import numpy as np
        import ray.util.collective as collective
        import torch
        from ray.util.collective.types import ReduceOp

        rank, size = collective.get_rank(name), collective.get_collective_group_size(name)
        results = {}
        vector = torch.full((2,), float(rank + 1))
        collective.allreduce(vector, name)
        results["sum"] = vector.tolist()
        for operation in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            array = np.full(2, rank + 1.0, dtype=np.float32)
            collective.allreduce(array, name, operation)
            results[operation.name] = array.tolist()
        vector = torch.full((2,), float(rank + 1))
        collective.reduce(vector, 1, name)
        results["reduce"] = vector.tolist()
        parts = [torch.zeros(1) for _ in range(size)]
        collective.allgather(parts, torch.tensor([float(rank)]), name)
        results["gather"] = torch.cat(parts).tolist()
        vector = torch.full((2,), float(rank))
        collective.broadcast(vector, 2, name)
        results["broadcast"] = vector.tolist()
        vector = torch.zeros(1)
        collective.reducescatter(vector, [torch.tensor([float(10 * r + rank)]) for r in range(size)], name)
        results["scatter"] = vector.tolist()
        vector = torch.full((1,), float(rank))
        if rank == 0:
            collective.send(vector, 2, name)
        if rank == 2:
            collective.recv(vector, 0, name)
        results["sent"] = vector.tolist()
        collective.barrier(name)
        return results

    def train(self):
        import torch
        from torch import nn

        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), float(self.rank))).sum().backward()
        return model.module.weight.grad.tolist()

    def close(self, name):
        import ray.util.collective as collective
        import torch.distributed as dist

        self.group.close()
        return collective.is_group_initialized(name), dist.is_initialized()


def test_ray_collective_reaches_the_group_by_its_name(local_ray):
    members = [Member.remote(rank) for rank in range(3)]

    def on_all(method, *args):
        return ray.get([getattr(member, method).remote(*args) for member in members], timeout=60)

    try:
        for backend, nodes in (("shared_memory", ("n",) * 3), ("gloo", ("a", "b", "c"))):
            store = host_store()
            rendezvous = Rendezvous(store.host, store.port, f"by-name-{backend}", 3, nodes, timeout_s=20)
            assert on_all("join", rendezvous) == [backend] * 3
            assert on_all("reduce") == [[3.0] * 4] * 3
            for rank, results in enumerate(on_all("use_ray", rendezvous.name)):
                assert results == {
                    "sum": [6.0, 6.0],
                    "MIN": [1.0, 1.0],
                    "MAX": [3.0, 3.0],
                    "PRODUCT": [6.0, 6.0],
                    "reduce": [6.0, 6.0] if rank == 1 else [rank + 1.0] * 2,
                    "gather": [0.0, 1.0, 2.0],
                    "broadcast": [2.0, 2.0],
                    "scatter": [30.0 * rank + 3],
                    "sent": [0.0] if rank != 1 else [1.0],
                }
            assert on_all("train") == [[[1.0, 1.0]]] * 3
            assert on_all("close", rendezvous.name) == [(False, False)] * 3
            store.close()
        stock = Rendezvous("", 0, "stock", 3, ("n",) * 3, "GLOO", timeout_s=20)
        assert on_all("join", stock) == ["GLOO"] * 3
        assert on_all("reduce") == [[3.0] * 4] * 3
    finally:
        for member in members:
            ray.kill(member)

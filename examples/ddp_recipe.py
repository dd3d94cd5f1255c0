"""PyTorch's recipe for DistributedDataParallel, unchanged, on Ray, and the same training with the loop on the driver.

`train_with_ddp` is the function one would give to torch.multiprocessing.spawn or torchrun; `torchdl_ray.spawn` runs it
on Ray actors. Global batch k consists of rows k*64 to k*64+63; DistributedSampler gives rank r every second of them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from torchdl_ray import DataParallel, spawn

NUM_WORKERS, BATCH, EPOCHS, LR, MOMENTUM = 2, 64, 5, 0.1, 0.9


def digits() -> TensorDataset:
    """1792 images of 64 pixels, float64 in 0..1, in an order drawn once; 28 whole batches."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))[: 28 * BATCH]
    images = torch.tensor(data.data, dtype=torch.float64) / 16
    return TensorDataset(images[order], torch.tensor(data.target)[order])


def make_model() -> nn.Module:
    """A small perceptron in float64, the same for every caller."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()


def train_with_ddp(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The recipe: process group, sampler, DDP, and an all-reduce inside backward."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    data = digits()
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH // world_size, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} on rank 0", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return model.module.state_dict()


def train_on_the_driver() -> dict[str, torch.Tensor]:
    """The same training with one loop: no ranks, no sampler, the whole batch."""
    with DataParallel(make_model(), num_workers=NUM_WORKERS) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        for epoch in range(EPOCHS):
            for images, labels in DataLoader(digits(), batch_size=BATCH, shuffle=False):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.4f} on the whole batch", flush=True)
        return model.state_dict()


def accuracy(weights: dict[str, torch.Tensor]) -> float:
    """The share of the digits that these weights read rightly."""
    model = make_model()
    model.load_state_dict(weights)
    images, labels = digits().tensors
    return (model(images).argmax(1) == labels).double().mean().item()


def main() -> None:
    by_rank = spawn(train_with_ddp, num_workers=NUM_WORKERS)
    for name, tensor in by_rank[0].items():
        assert all(torch.equal(tensor, other[name]) for other in by_rank[1:]), f"{name} differs between ranks"
    print(f"DDP: accuracy {accuracy(by_rank[0]):.4f} on the training rows, all ranks hold the same weights")
    ours = train_on_the_driver()
    print(f"DataParallel: accuracy {accuracy(ours):.4f}")
    worst = max((tensor - ours[name]).abs().max().item() for name, tensor in by_rank[0].items())
    assert worst < 1e-10, f"the weights differ by {worst}"
    print(f"both reached the same weights: the largest difference is {worst:.1e}")


if __name__ == "__main__":
    main()

"""Trains a small convolutional network on handwritten digits, on as many workers as the machine has cores.

    python examples/train_digits.py [--num-workers 2] [--epochs 10]

The digits come with scikit-learn (1797 images of 8 x 8 pixels). Dataset, loader, loss, optimizer and schedule are stock
PyTorch; one line differs from a script for a single process. Exits with an error if the model has not learnt to read.
"""

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from rich.progress import Progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchdl_ray import DataParallel

REQUIRED_ACCURACY = 0.97


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The digits as (training set, test set): images [N, 1, 8, 8] in 0..1, labels [N]."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=data.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_model() -> nn.Module:
    """Two convolutions and a linear layer: images [N, 1, 8, 8] to logits [N, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """The share of the images that the model reads right."""
    images, labels = dataset.tensors
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits with DataParallel.")
    parser.add_argument("--num-workers", type=int, default=None, help="default: all GPUs, else all CPUs; 0: no Ray")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = digits()
    loader = DataLoader(train_set, batch_size=64, shuffle=True)

    model = DataParallel(build_model(), num_workers=args.num_workers)  # <-- the one line that differs
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=args.epochs * len(loader))
    print(f"{len(train_set)} images for training, {len(test_set)} for the test, workers: {len(model.replicas)}")

    start = time.perf_counter()
    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("training", total=args.epochs * len(loader))
        for epoch in range(1, args.epochs + 1):
            model.train()
            losses = []
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())
                progress.advance(bar)
            mean_loss = sum(loss.item() for loss in losses) / len(losses)
            print(f"epoch {epoch:2d}  loss {mean_loss:.4f}  test accuracy {accuracy(model, test_set):.4f}")
    seconds = time.perf_counter() - start

    final = accuracy(model, test_set)
    print(f"{args.epochs * len(train_set) / seconds:.0f} samples per second, evaluation included")
    hashes = model.check_sync()  # raises if any parameter, buffer or optimizer state differs
    print(f"all replicas are equal, by their hashes: {' = '.join(hashes)}")
    print(f"test accuracy {final:.4f}")
    model.close()
    if final < REQUIRED_ACCURACY:
        sys.exit(f"test accuracy {final:.4f} is below {REQUIRED_ACCURACY}")


if __name__ == "__main__":
    main()

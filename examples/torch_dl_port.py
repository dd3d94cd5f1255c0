"""What the torch-dl gem for Ruby shows in its README, in Python with torchdl_ray.

    python examples/torch_dl_port.py

Each part trains on scikit-learn's handwritten digits on two workers, does the same with plain PyTorch in this process,
and checks that the two agree: gradients within 1e-5.
"""

import io
import itertools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torchdl_ray import DataParallel, gather, scatter

TOLERANCE = 1e-5


class Classifier(nn.Module):
    """Returns logits [N, 10]; with `targets` [N] it returns (logits, loss), as GPT models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh())
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Images [N, 8, 8], targets [N] or None."""
        logits = self.head(self.body(images))
        return logits if targets is None else (logits, F.cross_entropy(logits, targets))


def same_gradients(dp_model: nn.Module, plain: nn.Module, what: str) -> None:
    """Compares all gradients of the two models and prints the largest difference."""
    expected = dict(plain.named_parameters())
    worst = 0.0
    for name, parameter in dp_model.named_parameters():
        difference = (parameter.grad - expected.pop(name).grad).abs().max().item()
        assert difference <= TOLERANCE, f"{what}: the gradient of {name} differs by {difference}"
        worst = max(worst, difference)
    assert not expected, f"{what}: no gradient for {sorted(expected)}"
    print(f"{what}: gradients as in plain PyTorch, largest difference {worst:.1e}")


def basic_usage(dp_model: DataParallel, plain: nn.Module, images: Tensor, labels: Tensor) -> None:
    """`output = dp_model.call(input)`: outputs are gathered, the loss is computed here, on the driver."""
    optimizer = torch.optim.SGD(dp_model.parameters(), lr=0.1)

    optimizer.zero_grad()
    output = dp_model(images)
    loss = F.cross_entropy(output, labels)
    loss.backward()
    optimizer.step()

    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain_optimizer.zero_grad()
    F.cross_entropy(plain(images), labels).backward()
    plain_optimizer.step()
    same_gradients(dp_model, plain, "basic usage")


def models_that_return_loss(dp_model: DataParallel, plain: nn.Module, images: Tensor, labels: Tensor) -> None:
    """`logits, loss = dp_model.call(...)`, `dp_model.backward(scale: 1.0)`: no row leaves the workers.

    The gem needs its `backward` here, since gathering scalars breaks the graph; with torchdl_ray `loss.backward()`
    works as well.
    """
    optimizer = torch.optim.AdamW(dp_model.parameters(), lr=1e-3)

    optimizer.zero_grad()
    _logits, loss = dp_model(images, targets=labels)
    dp_model.backward(scale=1.0)
    optimizer.step()

    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    plain_optimizer.zero_grad()
    _logits, plain_loss = plain(images, targets=labels)
    plain_loss.backward()
    plain_optimizer.step()
    assert abs(loss.item() - plain_loss.item()) <= TOLERANCE
    same_gradients(dp_model, plain, "models that return (logits, loss)")


def gradient_accumulation(dp_model: DataParallel, plain: nn.Module, images: Tensor, labels: Tensor) -> None:
    """`dp_model.backward(scale: 1.0 / n)`: gradients meet once, at the step, not at every backward."""
    num_batches = 4
    batches = list(zip(images.chunk(num_batches), labels.chunk(num_batches), strict=True))
    optimizer = torch.optim.SGD(dp_model.parameters(), lr=0.1)

    optimizer.zero_grad()
    for image_batch, label_batch in batches:
        dp_model(image_batch, targets=label_batch)
        dp_model.backward(scale=1.0 / num_batches)
    optimizer.step()

    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain_optimizer.zero_grad()
    for image_batch, label_batch in batches:
        (plain(image_batch, targets=label_batch)[1] / num_batches).backward()
    plain_optimizer.step()
    same_gradients(dp_model, plain, f"accumulation over {num_batches} batches")


def the_model_and_its_state(dp_model: DataParallel, plain: nn.Module, images: Tensor) -> None:
    """`module` / `wrapped_module`, `parameters`, `state_dict` / `load_state_dict`, `train` / `eval`."""
    assert dp_model.wrapped_module is dp_model.module
    for ours, theirs in itertools.zip_longest(dp_model.module.parameters(), plain.parameters()):
        assert (ours - theirs).abs().max() <= TOLERANCE
    print("module, wrapped_module, parameters: the trained weights, as in plain PyTorch")

    file = io.BytesIO()
    torch.save(dp_model.state_dict(), file)  # bare keys, CPU tensors
    file.seek(0)
    fresh = Classifier()
    fresh.load_state_dict(torch.load(file))  # strict: a model that was never wrapped takes it
    before = dp_model(images).detach()
    assert (fresh(images) - before).abs().max() <= TOLERANCE
    other = Classifier()
    dp_model.load_state_dict(other.state_dict())
    assert (dp_model(images) - other(images)).abs().max() <= TOLERANCE
    print("state_dict, load_state_dict: from the workers to a plain model, and from a plain model to the workers")

    dp_model.eval()
    assert not any(dp_model.run(lambda module: module.head.training))
    dp_model.train()
    assert all(dp_model.run(lambda module: module.head.training))
    print("train, eval: on all workers")


def low_level_functions(images: Tensor) -> None:
    """`TorchDL.scatter(tensor, devices, dim)` and `TorchDL.gather(tensors, device, dim)`."""
    for dim in (0, 1):
        chunks = scatter(images, 3, dim)
        assert torch.equal(gather(chunks, dim), images)
        print(f"scatter, gather: {images.shape[dim]} along dimension {dim} in {[c.shape[dim] for c in chunks]}")


def main() -> None:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:301] / 16  # an odd number: the shards are unequal
    labels = torch.tensor(data.target)[:301]

    torch.manual_seed(0)
    plain = Classifier()
    module = Classifier()
    module.load_state_dict(plain.state_dict())
    with DataParallel(module, num_workers=2) as dp_model:  # DataParallel.new(module, device_ids: [0, 1])
        basic_usage(dp_model, plain, images, labels)
        models_that_return_loss(dp_model, plain, images, labels)
        gradient_accumulation(dp_model, plain, images, labels)
        the_model_and_its_state(dp_model, plain, images)
    low_level_functions(images)
    print("all parts agree with plain PyTorch")


if __name__ == "__main__":
    main()

"""Ways to use a model's output: each beside plain PyTorch, with the same values and gradients, or with a clear error.

A case is a function of a `Side`. It runs once on the plain module and once on the remote one, with one worker (bits
have to be the same) and with three workers that get 3, 2 and 2 rows. What it returns, and the gradients of all
parameters, of the inputs and of the driver's own layers are compared.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from torchdl_ray import DataParallel
from torchdl_ray.errors import GatherError, UnsupportedError
from torchdl_ray.remote_tensor import RemoteTensor
from torchdl_ray.scalar import MAX_DEPTH

ROWS = 7


class Net(nn.Module):
    """Features, logits and losses, each by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)
        self.back = nn.Linear(3, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

    def features(self, x):
        return torch.tanh(self.first(x))

    def classify(self, hidden):
        return self.second(hidden)

    def inverse(self, logits):
        return self.back(logits)

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)

    def both(self, x, y):
        logits = self(x)
        return logits, F.cross_entropy(logits, y)

    def losses(self, x, y):
        logits = self(x)
        return {"ce": F.cross_entropy(logits, y), "l2": logits.square().mean(), "logits": logits}

    def kinds(self, x):
        logits = self(x)
        return logits.argmax(1), logits > 0, torch.complex(logits, logits * 2), logits.bfloat16()

    def count(self, x):
        return self(x), torch.tensor(x.shape[0])


class Side:
    """One of the two models, with inputs, targets and driver-side layers that are alike on both sides."""

    def __init__(self, model: nn.Module, net: nn.Module) -> None:
        self.model, self.net = model, net
        self.remote = isinstance(model, DataParallel)
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(ROWS, 4, dtype=torch.float64, generator=g).requires_grad_()
        self.z = torch.randn(ROWS, 4, dtype=torch.float64, generator=g)
        self.y = torch.randint(0, 3, (ROWS,), generator=g)
        self.t = torch.rand(ROWS, 3, dtype=torch.float64, generator=g)
        self.w = torch.randn(ROWS, 3, dtype=torch.float64, generator=g)
        self.v = torch.randn(ROWS, 3, dtype=torch.float64, generator=g).requires_grad_()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.head = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
            self.stem = nn.Linear(4, 4).double()
            self.mid = nn.Linear(6, 6).double()

    def call(self, method: str, *args: Any) -> Any:
        return self.model.call(method, *args) if self.remote else getattr(self.model, method)(*args)

    def out(self) -> Any:
        return self.model(self.x)

    def loss(self) -> Any:
        return self.call("loss", self.x, self.y)

    def gradients(self) -> dict[str, Any]:
        own = {"head": self.head, "stem": self.stem, "mid": self.mid}
        found = {f"{k}.{n}": p.grad for k, m in own.items() for n, p in m.named_parameters()}
        found.update({"x": self.x.grad, "v": self.v.grad, "z": self.z.grad})
        found.update({n: p.grad for n, p in self.net.named_parameters()})
        return {k: None if g is None else torch.from_numpy(g.detach().numpy().copy()) for k, g in found.items()}


def plainly(value: Any) -> Any:
    """The value with every tensor as a plain copy."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            copied = torch.stack([value])[0]
        assert type(copied) is torch.Tensor
        return copied
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {k: plainly(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plainly(v) for v in value]
    return value


def assert_same(found: Any, expected: Any, exact: bool, path: str = "result") -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{path}: {type(found)}"
        assert found.dtype == expected.dtype, path
        assert found.shape == expected.shape, path
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-9, "atol": 1e-12}
        if not exact and expected.dtype in (torch.bfloat16, torch.float32):
            tolerance = {"rtol": 1e-2, "atol": 1e-3}
        torch.testing.assert_close(found, expected, **tolerance, equal_nan=True, msg=lambda m: f"{path}: {m}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_same(found[key], value, exact, f"{path}[{key!r}]")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for k, value in enumerate(expected):
            assert_same(found[k], value, exact, f"{path}[{k}]")
    elif isinstance(expected, float):
        assert type(found) is float, path
        assert found == expected if exact else math.isclose(found, expected, rel_tol=1e-9), path
    else:
        assert found == expected, path
        assert type(found) is type(expected), path


class Models:
    """A plain module and its remote twin."""

    def __init__(self, workers: int) -> None:
        torch.manual_seed(0)
        net = Net().double()
        self.workers = workers
        self.twin = copy.deepcopy(net)
        self.net = net
        self.model = DataParallel(net, workers, backend="local", timeout_s=30)

    def sides(self) -> tuple[Side, Side]:
        self.twin.zero_grad()
        self.model.zero_grad()
        return Side(self.twin, self.twin), Side(self.model, self.net)

    def live_calls(self) -> int:
        self.model.flush()
        self.model._stream.finish()
        return len(self.model._stream.group.workers[0].state.calls.live)


@pytest.fixture(scope="module", params=[0, 3], ids=["W1", "W3"])
def models(request):
    made = Models(request.param)
    yield made
    made.model.close()


def run(models: Models, case: Callable[[Side], Any], exact: bool | None = None) -> None:
    plain, remote = models.sides()
    torch.manual_seed(1)
    expected = plainly(case(plain))
    torch.manual_seed(1)
    found = plainly(case(remote))
    exact = models.workers == 0 if exact is None else exact
    assert_same(found, expected, exact)
    assert_same(remote.gradients(), plain.gradients(), exact, "gradients")


def train(value: Any) -> Any:
    """Backward through whatever tensors a case made, each entry with a weight of its own."""
    tensors = [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor)]
    total = 0
    for tensor in tensors:
        if tensor.requires_grad:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = torch.linspace(0.5, 1.5, real.numel(), dtype=torch.float64).to(real.dtype).view(real.shape)
            total = total + (real * weights).sum()
    if isinstance(total, torch.Tensor):
        total.backward()
    return value


def trained(value: Any) -> None:
    train(value)


# ---- one look at an output [7, 3]; whatever it gives is trained on

N = None
LOOKS: dict[str, Callable[[Any, Side], Any]] = {
    # arithmetic
    "o + 1": lambda o, s: o + 1,
    "1 + o": lambda o, s: 1 + o,
    "o - 1": lambda o, s: o - 1,
    "1 - o": lambda o, s: 1 - o,
    "o * 2": lambda o, s: o * 2,
    "o / 3": lambda o, s: o / 3,
    "3 / o": lambda o, s: 3 / o,
    "o ** 2": lambda o, s: o**2,
    "2 ** o": lambda o, s: 2**o,
    "o % 0.3": lambda o, s: o % 0.3,
    "-o": lambda o, s: -o,
    "abs(o)": lambda o, s: abs(o),
    "round(o)": lambda o, s: o.round(),
    "o @ m": lambda o, s: o @ s.t.T,
    "m @ o": lambda o, s: s.t.T @ o,
    "o + o": lambda o, s: o + o,
    "o * o": lambda o, s: o * o,
    "o * t": lambda o, s: o * s.w,
    "t * o": lambda o, s: s.w * o,
    "t - o": lambda o, s: s.w - o,
    "v * o": lambda o, s: s.v * o,
    "v += o": lambda o, s: (s.v * 1).add_(o),
    "o > 0": lambda o, s: o > 0,
    "o == o": lambda o, s: o == o,
    "o != t": lambda o, s: o != s.t,
    "(o > 0) & (o < 1)": lambda o, s: (o > 0) & (o < 1),
    "~(o > 0)": lambda o, s: ~(o > 0),
    "numpy * o": lambda o, s: torch.as_tensor(s.w.numpy()) * o,
    "o.add alpha": lambda o, s: o.add(s.w, alpha=2),
    "torch.add alpha": lambda o, s: torch.add(s.w, o, alpha=2),
    "torch.addmm": lambda o, s: torch.addmm(s.w[:3, :3], o.T, o),
    "torch.addcmul": lambda o, s: torch.addcmul(s.w, s.t, o, value=0.5),
    "torch.where": lambda o, s: torch.where(o > 0, o, s.w),
    "torch.lerp": lambda o, s: torch.lerp(s.w, o, 0.3),
    "torch.einsum": lambda o, s: torch.einsum("nc,nd->cd", o, s.w),
    "torch.einsum list": lambda o, s: torch.einsum("nc,nd->cd", [s.w, o]),
    "torch.matmul": lambda o, s: torch.matmul(s.w.T, o),
    "torch.bmm": lambda o, s: torch.bmm(o.unsqueeze(2), s.w.unsqueeze(1)),
    "torch.cdist": lambda o, s: torch.cdist(s.w, o),
    "torch.outer": lambda o, s: torch.outer(o[:, 0], s.w[:, 0]),
    # elementwise and reductions
    "exp": lambda o, s: o.exp(),
    "torch.sigmoid": lambda o, s: torch.sigmoid(o),
    "softmax": lambda o, s: o.softmax(1),
    "log_softmax": lambda o, s: F.log_softmax(o, dim=-1),
    "logsumexp": lambda o, s: o.logsumexp(1),
    "clamp": lambda o, s: o.clamp(-0.1, 0.1),
    "clamp by tensor": lambda o, s: torch.clamp(s.w, max=o),
    "mean": lambda o, s: o.mean(),
    "sum": lambda o, s: o.sum(),
    "builtin sum": lambda o, s: sum(o),
    "mean dim": lambda o, s: o.mean(0),
    "std": lambda o, s: o.std(0),
    "norm": lambda o, s: o.norm(),
    "torch.linalg.norm": lambda o, s: torch.linalg.norm(o, dim=1),
    "max": lambda o, s: o.max(),
    "builtin max": lambda o, s: max(o[:, 0]),
    "max dim": lambda o, s: o.max(1),
    "max dim unpacked": lambda o, s: list(o.max(dim=1)),
    "torch.maximum": lambda o, s: torch.maximum(s.w, o),
    "argmax": lambda o, s: o.argmax(1),
    "topk": lambda o, s: o.topk(2),
    "sort": lambda o, s: torch.sort(o, 0),
    "cumsum": lambda o, s: o.cumsum(0),
    "prod": lambda o, s: o.prod(1),
    "median": lambda o, s: o.median(0),
    "torch.var_mean": lambda o, s: torch.var_mean(o),
    "torch.allclose": lambda o, s: torch.allclose(o, o),
    "torch.equal": lambda o, s: torch.equal(s.w, o),
    "isnan any": lambda o, s: o.isnan().any(),
    "linalg.svd": lambda o, s: torch.linalg.svdvals(o),
    # shape and index
    "o[0]": lambda o, s: o[0],
    "o[-1, 1]": lambda o, s: o[-1, 1],
    "o[2:5]": lambda o, s: o[2:5],
    "o[..., None]": lambda o, s: o[..., None],
    "o[mask]": lambda o, s: o[s.t > 0.5],
    "o[index]": lambda o, s: o[torch.tensor([5, 0, 5])],
    "o[range, y]": lambda o, s: o[torch.arange(ROWS), s.y],
    "t[o argmax]": lambda o, s: s.t[o.argmax(1)],
    "list[int(o)]": lambda o, s: [10, 20, 30][o.argmax(1)[0]],
    "gather": lambda o, s: o.gather(1, s.y[:, None]),
    "take_along_dim": lambda o, s: torch.take_along_dim(o, s.y[:, None], 1),
    "index_select": lambda o, s: torch.index_select(o, 0, torch.tensor([1, 1, 6])),
    "masked_select": lambda o, s: torch.masked_select(s.w, o > 0),
    "view": lambda o, s: o.view(-1),
    "reshape": lambda o, s: o.reshape(3, 7),
    "T": lambda o, s: o.T,
    "permute": lambda o, s: o.permute(1, 0),
    "squeeze": lambda o, s: o.unsqueeze(0).squeeze(0),
    "flatten": lambda o, s: torch.flatten(o),
    "expand": lambda o, s: o.expand(2, 7, 3),
    "repeat": lambda o, s: o.repeat(2, 1),
    "tile": lambda o, s: torch.tile(o, (1, 2)),
    "split": lambda o, s: list(o.split(2)),
    "chunk": lambda o, s: [c.sum() for c in torch.chunk(o, 3)],
    "unbind": lambda o, s: [c.sum() for c in o.unbind(1)],
    "unpacking": lambda o, s: [c.sum() for c in (lambda a, *b: [a, *b])(*o)],
    "iteration": lambda o, s: [row.sum() for row in o],
    "enumerate zip": lambda o, s: [a * k + b.sum() for k, (a, b) in enumerate(zip(o, s.w, strict=True))],
    "reversed": lambda o, s: reversed(o),
    "torch.stack": lambda o, s: torch.stack([o, s.w, o]),
    "torch.stack tuple": lambda o, s: torch.stack((s.w, o), dim=1),
    "torch.cat": lambda o, s: torch.cat([s.w, o]),
    "torch.cat kwargs": lambda o, s: torch.cat(tensors=[s.w, o], dim=1),
    "torch.hstack": lambda o, s: torch.hstack((o, s.w)),
    "torch.meshgrid": lambda o, s: torch.meshgrid(o[:, 0], s.w[:, 0], indexing="ij"),
    "torch.broadcast_tensors": lambda o, s: torch.broadcast_tensors(o, s.w[0]),
    "torch.block_diag": lambda o, s: torch.block_diag(o, s.w),
    "pad_sequence": lambda o, s: nn.utils.rnn.pad_sequence([o, s.w[:2]]),
    "F.pad": lambda o, s: F.pad(o, (1, 1)),
    "roll flip": lambda o, s: o.roll(1, 0).flip(1),
    "tril": lambda o, s: torch.tril(o),
    "diagonal": lambda o, s: o.diagonal(),
    "scatter": lambda o, s: torch.zeros(7, 3, dtype=torch.float64).scatter(1, s.y[:, None].expand(7, 3), o),
    "index_put": lambda o, s: torch.zeros(9, 3, dtype=torch.float64).index_put((torch.arange(7),), o),
    "F.one_hot": lambda o, s: F.one_hot(o.argmax(1), 3),
    "F.embedding": lambda o, s: F.embedding(o.argmax(1), s.v),
    "torch.bincount": lambda o, s: torch.bincount(o.argmax(1), minlength=3),
    "torch.vmap": lambda o, s: torch.vmap(lambda row: row * 2)(o.detach()),
    # in place, and out=
    "o += 1": lambda o, s: o.__iadd__(1),
    "o *= t": lambda o, s: o.__imul__(s.w),
    "o.add_ seen by o": lambda o, s: [o.add_(1), o],
    "o.mul_": lambda o, s: o.mul_(s.w),
    "o.clamp_": lambda o, s: o.clamp_(min=0),
    "o.masked_fill_": lambda o, s: o.masked_fill_(s.t > 0.5, 0.25),
    "o[0] = 0": lambda o, s: [o.__setitem__(0, 0.0), o],
    "o[:, 1] = t": lambda o, s: [o.__setitem__((slice(None), 1), s.w[:, 1]), o],
    "o[:, 1] += 1": lambda o, s: [o[:, 1].add_(1), o],
    "o.zero_": lambda o, s: o.zero_(),
    "o.copy_": lambda o, s: o.copy_(s.w),
    "o.fill_diagonal_": lambda o, s: o.fill_diagonal_(0.0),
    "F.relu inplace": lambda o, s: F.relu(o, inplace=True),
    "o.t_": lambda o, s: o.t_(),
    "o.unsqueeze_": lambda o, s: [o.unsqueeze_(0), o],
    "buffer.copy_(o)": lambda o, s: torch.zeros(7, 3, dtype=torch.float64).copy_(o),
    "buffer[...] = o": lambda o, s: (lambda b: [b.__setitem__(..., o), b])(torch.zeros(7, 3, dtype=torch.float64)),
    "buffer += o": lambda o, s: torch.zeros(7, 3, dtype=torch.float64).__iadd__(o),
    "out= plain": lambda o, s: torch.add(o.detach(), 1, out=torch.zeros(7, 3, dtype=torch.float64)),
    "out= o": lambda o, s: [torch.add(s.w, 1, out=o.detach()), o],
    "torch.mul out kwarg": lambda o, s: (lambda b: [torch.mul(s.w, o.detach(), out=b), b])(torch.zeros_like(s.w)),
    # devices, dtypes, properties
    "o.float": lambda o, s: o.float(),
    "o.to": lambda o, s: o.to(torch.float32),
    "o.cpu": lambda o, s: o.cpu(),
    "o.type": lambda o, s: o.type(torch.float32),
    "o.contiguous": lambda o, s: o.contiguous(),
    "o.type_as": lambda o, s: s.y.type_as(o),
    "o.new_zeros": lambda o, s: o.new_zeros(3),
    "zeros_like": lambda o, s: torch.zeros_like(o),
    "ones_like requires_grad": lambda o, s: torch.ones_like(o, requires_grad=True),
    "dtype device": lambda o, s: [str(o.dtype), str(o.device), str(o.layout), o.is_cuda, o.is_sparse],
    "shape": lambda o, s: [tuple(o.shape), o.size(0), o.size(dim=1), tuple(o.size()), o.ndim, o.dim(), o.numel()],
    "len": lambda o, s: len(o),
    "stride": lambda o, s: [o.stride(), o.is_contiguous(), o.element_size(), o.nbytes],
    "is_floating_point": lambda o, s: [o.is_floating_point(), torch.is_complex(o), o.is_signed()],
    "isinstance": lambda o, s: [isinstance(o, torch.Tensor), torch.is_tensor(o), isinstance(o, nn.Parameter)],
    "isinstance by type": lambda o, s: [isinstance(o, torch.DoubleTensor), isinstance(o, torch.FloatTensor)],
    "requires_grad": lambda o, s: [o.requires_grad, o.is_leaf, o.grad_fn is None],
    "result_type": lambda o, s: str(torch.result_type(o, 1)),
    "as_subclass": lambda o, s: o.as_subclass(torch.Tensor),
    # leaving torch
    "detach numpy": lambda o, s: o.detach().numpy(),
    "np.asarray": lambda o, s: np.asarray(o.detach()),
    "np.array of rows": lambda o, s: np.array([r.detach().numpy() for r in o]),
    "np.mean": lambda o, s: float(np.mean(o.detach().cpu().numpy())),
    "numpy(force)": lambda o, s: o.numpy(force=True),
    "tolist": lambda o, s: o.tolist(),
    "item": lambda o, s: o[0, 0].item(),
    "float int bool": lambda o, s: [float(o[0, 0]), int(o[0, 1] * 10), bool(o[0, 0] > 0)],
    "f-string": lambda o, s: [f"{o[0, 0]:.4f}", f"{o.detach().sum():.3f}", "%.3f" % o.sum()],  # noqa: UP031
    "repr": lambda o, s: repr(o.detach()),
    "str": lambda o, s: str(o.detach()),
    "dlpack": lambda o, s: torch.from_dlpack(o.detach()),
    "as_tensor": lambda o, s: torch.as_tensor(o),
    "torch.tensor": lambda o, s: torch.tensor(o.detach().tolist(), dtype=torch.float64),
    "default_collate": lambda o, s: default_collate([o, s.w]),
    "default_collate of dicts": lambda o, s: default_collate([{"a": r, "k": 1} for r in o]),
    "membership": lambda o, s: [1.0 in o, o is o, {o: 1}[o]],
    # copies
    "clone": lambda o, s: o.clone(),
    "clone changed": lambda o, s: [o.clone().mul_(2), o],
    "copy.copy": lambda o, s: copy.copy(o.detach()),
    "copy.copy with graph": lambda o, s: [copy.copy(o).requires_grad, copy.copy(o).is_leaf],
    "deepcopy": lambda o, s: copy.deepcopy(o.detach()),
    "pickle": lambda o, s: pickle.loads(pickle.dumps(o.detach())),
    "pickle keeps requires_grad": lambda o, s: pickle.loads(pickle.dumps(o)).requires_grad,
    "torch.save": lambda o, s: saved(o.detach()),
    "torch.save in dict": lambda o, s: saved({"o": o.detach(), "n": 1}),
    # graph
    "detach": lambda o, s: o.detach(),
    "detach changed": lambda o, s: [o.detach().mul_(0.5), o],
    "torch.detach": lambda o, s: torch.detach(o),
    "detach twice": lambda o, s: o.detach().detach(),
    "detach then train": lambda o, s: o.detach() * s.v,
    "data": lambda o, s: o.data,
    "data changed": lambda o, s: [o.data.mul_(0.5), o],
    "detach_": lambda o, s: [o.detach_(), o.requires_grad],
    "detach requires_grad_": lambda o, s: (lambda d: [trained(d * s.w), d.grad])(o.detach().requires_grad_()),
    "fetched twice": lambda o, s: [o + 0, o * 2],
    "nn.Parameter": lambda o, s: (lambda p: [trained(p * 2), p.grad, p.is_leaf])(nn.Parameter(o.detach() + 0)),
    # layers and losses on the driver
    "head": lambda o, s: s.head(o),
    "layer norm": lambda o, s: F.layer_norm(o, (3,)),
    "batch norm": lambda o, s: F.batch_norm(o, None, None, training=True),
    "dropout": lambda o, s: F.dropout(o, 0.5),
    "bilinear": lambda o, s: F.bilinear(o, s.w, s.w[:2, :, None].expand(2, 3, 3)),
    "conv1d": lambda o, s: F.conv1d(o[:, None], s.w[:2, None, :2]),
    "interpolate": lambda o, s: F.interpolate(o[:, None], size=6),
    "attention": lambda o, s: F.scaled_dot_product_attention(o, s.w, s.v),
    "gumbel_softmax": lambda o, s: F.gumbel_softmax(o, hard=True),
    "multi_head": lambda o, s: seeded(nn.MultiheadAttention, 3, 1, dtype=torch.float64)(o[None], o[None], o[None])[0],
    "transformer layer": lambda o, s: seeded(
        nn.TransformerEncoderLayer, 3, 1, 8, 0.0, dtype=torch.float64, batch_first=True
    )(o[None]),
    "lstm": lambda o, s: seeded(nn.LSTM, 3, 4, dtype=torch.float64)(o)[0],
    "gru cell": lambda o, s: seeded(nn.GRUCell, 3, 4, dtype=torch.float64)(o),
    "distribution": lambda o, s: torch.distributions.Categorical(logits=o).log_prob(s.y),
    "distribution entropy": lambda o, s: torch.distributions.Normal(o, 1.0).entropy() * o,
    "kl_divergence": lambda o, s: torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=o), torch.distributions.Categorical(probs=s.t)
    ),
    "jit script": lambda o, s: SCRIPTED(o.detach(), s.w),
    "checkpoint": lambda o, s: checkpoint(s.head, o, use_reentrant=False),
    "saved_tensors_hooks": lambda o, s: with_hooks(o, s),
    "autocast look": lambda o, s: autocast_look(o, s),
    "no_grad look": lambda o, s: [no_grad(lambda: o * 2), o],
    "inference look": lambda o, s: [inference(lambda: (o * 2).sum().item()), o],
    "set_grad_enabled": lambda o, s: (torch.set_grad_enabled(True) and N) or o,
    "vector backward": lambda o, s: o.backward(s.w),
    "backward gradient kwarg": lambda o, s: o.backward(gradient=s.w),
    "autograd.grad x": lambda o, s: torch.autograd.grad(o.sum(), s.x),
    "autograd.grad outputs": lambda o, s: torch.autograd.grad(o, s.x, grad_outputs=s.w),
    "autograd.grad o": lambda o, s: torch.autograd.grad((o * s.w).sum(), o),
    "autograd.grad list": lambda o, s: torch.autograd.grad([(o * s.v).sum(), o.mean()], [s.x, s.v]),
    "autograd.grad kwargs": lambda o, s: torch.autograd.grad(outputs=o.sum(), inputs=s.x),
    "retain_grad": lambda o, s: [o.retain_grad(), trained(o * s.w), o.grad],
    "retains_grad": lambda o, s: [o.retains_grad, o.retain_grad(), o.retains_grad],
    "register_hook": lambda o, s: hooked(o, lambda: trained(o * s.w)),
    "hook changes gradient": lambda o, s: [o.register_hook(lambda g: g * 3) is N, trained(o)],
    "hook on detach": lambda o, s: raises(RuntimeError, lambda: o.detach().register_hook(print)),
}

LOSSES: dict[str, Callable[[Any, Side], Any]] = {
    "cross_entropy": lambda o, s: F.cross_entropy(o, s.y),
    "cross_entropy sum": lambda o, s: F.cross_entropy(o, s.y, reduction="sum"),
    "cross_entropy none": lambda o, s: F.cross_entropy(o, s.y, reduction="none").mean(),
    "cross_entropy kwargs": lambda o, s: F.cross_entropy(input=o, target=s.y, label_smoothing=0.1),
    "CrossEntropyLoss": lambda o, s: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3]).double())(o, s.y),
    "nll_loss": lambda o, s: F.nll_loss(o.log_softmax(1), s.y),
    "mse_loss": lambda o, s: F.mse_loss(o, s.t),
    "mse_loss target": lambda o, s: F.mse_loss(s.v, o),
    "MSELoss": lambda o, s: nn.MSELoss()(o, s.t),
    "l1_loss": lambda o, s: F.l1_loss(o, s.t),
    "smooth_l1": lambda o, s: F.smooth_l1_loss(o, s.t),
    "huber": lambda o, s: nn.HuberLoss()(o, s.t),
    "bce_with_logits": lambda o, s: F.binary_cross_entropy_with_logits(o, s.t),
    "BCELoss": lambda o, s: nn.BCELoss()(torch.sigmoid(o), s.t),
    "kl_div": lambda o, s: F.kl_div(o.log_softmax(1), s.t, reduction="batchmean"),
    "KLDivLoss as target": lambda o, s: nn.KLDivLoss(reduction="sum", log_target=True)(s.v, o.log_softmax(1)),
    "poisson": lambda o, s: F.poisson_nll_loss(o, s.t),
    "gaussian": lambda o, s: F.gaussian_nll_loss(o, s.t, s.t + 1),
    "margin ranking": lambda o, s: F.margin_ranking_loss(o[:, 0], o[:, 1], torch.ones(ROWS)),
    "multi margin": lambda o, s: F.multi_margin_loss(o, s.y),
    "triplet": lambda o, s: nn.TripletMarginLoss()(o, s.t, s.w),
    "cosine embedding": lambda o, s: F.cosine_embedding_loss(o, s.t, torch.ones(ROWS)),
    "soft margin": lambda o, s: F.soft_margin_loss(o, s.t.round() * 2 - 1),
    "ctc": lambda o, s: F.ctc_loss(
        o.log_softmax(1)[:, None], torch.tensor([[1, 2]]), torch.tensor([7]), torch.tensor([2])
    ),
    "hand written": lambda o, s: ((o - s.t) ** 2).sum(1).sqrt().mean(),
    "contrastive": lambda o, s: F.cross_entropy(F.normalize(o) @ F.normalize(s.w).T, torch.arange(ROWS)),
}

# ---- one look at a loss [] that the module returned; whatever it gives is trained on

SCALARS: dict[str, Callable[[Any, Side], Any]] = {
    "loss": lambda a, s: a,
    "loss / 4": lambda a, s: a / 4,
    "2 * loss + 1": lambda a, s: 2 * a + 1,
    "1 - loss": lambda a, s: 1 - a,
    "-loss": lambda a, s: -a,
    "loss.mean()": lambda a, s: a.mean(),
    "torch.mean": lambda a, s: torch.mean(a),
    "loss.sum() / 2": lambda a, s: a.sum() / 2,
    "loss ** 2": lambda a, s: a**2,
    "loss * loss": lambda a, s: a * a,
    "1 / loss": lambda a, s: 1 / a,
    "loss.exp()": lambda a, s: a.exp(),
    "loss.clone()": lambda a, s: a.clone(),
    "loss + loss": lambda a, s: a + a,
    "loss - loss.detach()": lambda a, s: a - a.detach(),
    "loss * detached": lambda a, s: a * a.detach(),
    "loss / detached": lambda a, s: a / a.detach(),
    "loss * tensor": lambda a, s: a * torch.tensor(3.0),
    "loss * float64 tensor": lambda a, s: a * torch.tensor(3.0, dtype=torch.float64),
    "tensor * loss": lambda a, s: torch.tensor(3.0) * a,
    "loss + tensor": lambda a, s: a + torch.tensor(3.0, dtype=torch.float64),
    "tensor + loss": lambda a, s: torch.tensor(0.0) + a,
    "loss + driver's loss": lambda a, s: a + (s.v**2).mean(),
    "driver's loss + loss": lambda a, s: (s.v**2).mean() + a * 0.5,
    "loss * driver's": lambda a, s: a * (s.v**2).mean(),
    "loss / driver's": lambda a, s: a / (s.v**2).mean(),
    "tensor, changed later": lambda a, s: changed_later(a),
    "loss * rows": lambda a, s: a * s.w,
    "loss + alpha": lambda a, s: torch.add(a, a, alpha=2),
    "loss += 1": lambda a, s: [a.__iadd__(1), a],
    "loss *= 2": lambda a, s: [a.__imul__(2), a],
    "loss /= 2 seen by alias": lambda a, s: (lambda b: [a.div_(2), b])(a),
    "loss.add_(loss)": lambda a, s: a.add_(a.detach() * 2),
    "in place after use": lambda a, s: (lambda b: [a.mul_(3), b])(a * 2),
    "in place seen by detach": lambda a, s: (lambda d: [a.mul_(3), d])(a.detach()),
    "in place under no_grad": lambda a, s: (lambda b: [no_grad(lambda: b.mul_(3)) is N, b])(a * 2),
    "float() in place": lambda a, s: (lambda t: [t.__iadd__(a), t])(torch.zeros((), dtype=torch.float64)),
    "loss.backward twice graph": lambda a, s: [a.backward(retain_graph=True), a.backward()],
    "second backward": lambda a, s: [a.backward(), raises(RuntimeError, a.backward)],
    "item then backward": lambda a, s: [a.item(), float(a), a.backward()],
    "float": lambda a, s: float(a),
    "int": lambda a, s: int(a * 100),
    "bool": lambda a, s: bool(a),
    "compare": lambda a, s: [a > 0, a > 1, a == a],
    "if": lambda a, s: "low" if a < 0.5 else "high",
    "f-string": lambda a, s: f"{a:.6f} {a.item():.3f}",
    "percent": lambda a, s: "%.6f" % a,  # noqa: UP031
    "math.isnan": lambda a, s: [math.isnan(a), math.exp(a) > 0],
    "round": lambda a, s: round(a.item(), 6),
    "torch.isfinite": lambda a, s: torch.isfinite(a),
    "np.array": lambda a, s: np.array([a.detach(), a.detach()]),
    "np.mean": lambda a, s: float(np.mean([a.item(), 1.0])),
    "torch.tensor of losses": lambda a, s: torch.tensor([a, a]),
    "torch.stack of losses": lambda a, s: torch.stack([a, a * 2]).mean(),
    "sum of losses": lambda a, s: sum([a, a, a]) / 3,
    "tolist": lambda a, s: a.tolist(),
    "detach.item": lambda a, s: a.detach().item(),
    "detach + 1": lambda a, s: a.detach() + 1,
    "data": lambda a, s: a.data,
    "deepcopy": lambda a, s: copy.deepcopy(a.detach()),
    "view(1)": lambda a, s: a.view(1),
    "unsqueeze": lambda a, s: a.unsqueeze(0),
    "expand": lambda a, s: a.expand(3),
    "float32": lambda a, s: a.float(),
    "to": lambda a, s: a.to("cpu"),
    "shape": lambda a, s: [tuple(a.shape), a.ndim, a.numel(), a.dim(), a.size()],
    "len raises": lambda a, s: raises(TypeError, lambda: len(a)),
    "iteration raises": lambda a, s: raises(TypeError, lambda: list(a)),
    "requires_grad": lambda a, s: [a.requires_grad, a.is_leaf, a.detach().requires_grad, (a / 2).requires_grad],
    "grad_fn": lambda a, s: [a.grad_fn is N, a.detach().grad_fn is N],
    "retain_grad": lambda a, s: [a.retain_grad(), (a * 3).backward(), a.grad],
    "retain_grad of expression": lambda a, s: (lambda b: [b.retain_grad(), (b * 2).backward(), b.grad])(a * 3),
    "retain_grad after use": lambda a, s: (lambda b: [a.retain_grad(), b.backward(), a.grad])(a * 3),
    "retain_grad after look": lambda a, s: (lambda b: [a.item(), a.retain_grad(), b.backward(), a.grad])(a * 3),
    "register_hook": lambda a, s: hooked(a, lambda: (a * 3).backward()),
    "register_hook, looked at": lambda a, s: hooked(a, lambda: [f"{a}", (a * 3).backward()]),
    "register_hook of expression": lambda a, s: (lambda b: hooked(b, lambda: [b.item(), b.backward()]))(a * 3),
    "register_hook, late": lambda a, s: (lambda b: hooked(a, b.backward))(a**2),
    "hook scales": lambda a, s: [a.register_hook(lambda g: g * 2) is N, a],
    "backward(gradient)": lambda a, s: a.backward(torch.tensor(2.0, dtype=torch.float64)),
    "autograd.backward": lambda a, s: torch.autograd.backward(a),
    "autograd.backward of several": lambda a, s: torch.autograd.backward([a, a * 2, (s.v**2).sum()]),
    "autograd.backward with grads": lambda a, s: torch.autograd.backward([a], [torch.tensor(0.5).double()]),
    "autograd.grad x": lambda a, s: torch.autograd.grad(a, s.x),
    "autograd.grad retain then backward": lambda a, s: [torch.autograd.grad(a, s.x, retain_graph=True), a.backward()],
    "autograd.grad loss": lambda a, s: torch.autograd.grad(a * 3, a),
    "backward(inputs=x)": lambda a, s: a.backward(inputs=[s.x]),
    "backward(inputs=x) of expression": lambda a, s: (a * 2 + (s.v**2).sum()).backward(inputs=[s.x, s.v]),
    "no_grad look": lambda a, s: [no_grad(lambda: a * 2), no_grad(lambda: (a * 2).requires_grad), a],
    "inference look": lambda a, s: [inference(lambda: float(a * 2)), a],
    "inference detach": lambda a, s: [inference(lambda: (a.detach() + 1).item()), a],
    "dict of losses": lambda a, s: {k: float(v) for k, v in {"a": a, "b": a / 2}.items()},
    "max of losses": lambda a, s: max(a, a * 2),
    "sorted": lambda a, s: sorted([a * 2, a])[0],
    "clamp": lambda a, s: a.clamp(max=0.1),
    "where": lambda a, s: torch.where(a > 0, a, a * 2),
    "isinstance": lambda a, s: [isinstance(a, torch.Tensor), torch.is_tensor(a), a.dtype == torch.float64],
    "log dict later": lambda a, s: (lambda log: [a.backward(), [v.item() for v in log]])([a.detach(), a * 2]),
    "kwargs": lambda a, s: torch.mul(input=a, other=2),
    "torch.dot": lambda a, s: torch.dot(a.view(1), a.view(1)),
    "running mean": lambda a, s: 0.9 * torch.tensor(1.0, dtype=torch.float64) + 0.1 * a.detach(),
    "complex()": lambda a, s: [complex(a).real, complex(a).imag],
    "nan_to_num": lambda a, s: torch.nan_to_num(a),
    "ema in place": lambda a, s: torch.ones((), dtype=torch.float64).mul_(0.9).add_(a.detach(), alpha=0.1),
    "lerp_": lambda a, s: torch.ones((), dtype=torch.float64).lerp_(a.detach(), 0.1),
}


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def seeded(make, *args, **kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return make(*args, **kwargs)


def with_hooks(o, s):
    with torch.autograd.graph.save_on_cpu():
        return s.head(o) * 2


def autocast_look(o, s):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return s.head.float()(o.float()).float().sum()


def no_grad(f):
    with torch.no_grad():
        return f()


def inference(f):
    with torch.inference_mode():
        return f()


def raises(error, f):
    with pytest.raises(error):
        f()
    return error.__name__


def hooked(tensor, act):
    seen = []
    handle = tensor.register_hook(lambda g: seen.append(g.clone()))
    act()
    handle.remove()
    return seen


def changed_later(a):
    t = torch.tensor(2.0, dtype=torch.float64)
    total = a + t
    t.fill_(7.0)
    return total


@torch.jit.script
def SCRIPTED(a, b):
    return torch.relu(a) * b


@pytest.mark.parametrize("name", LOOKS)
def test_look_at_output(models, name):
    run(models, lambda s: train(LOOKS[name](s.out(), s)))


@pytest.mark.parametrize("name", LOSSES)
def test_loss_on_driver(models, name):
    run(models, lambda s: train(LOSSES[name](s.out(), s)))


@pytest.mark.parametrize("name", SCALARS)
def test_loss_of_module(models, name):
    run(models, lambda s: train(SCALARS[name](s.loss(), s)))


# ---- whole pieces of user code


def mixture(s):
    logits, loss = s.call("both", s.x, s.y)
    total = loss * 0.5 + F.mse_loss(logits, s.t)
    total.backward()
    return total


def mixture_of_parts(s):
    logits, loss = s.call("both", s.x, s.y)
    (loss + 0.1 * logits.square().mean() + (s.v * logits).sum()).backward()


def two_backwards(s):
    logits, loss = s.call("both", s.x, s.y)
    loss.backward(retain_graph=True)
    logits.sum().backward()
    return loss, logits


def several_losses(s):
    found = s.call("losses", s.x, s.y)
    (found["ce"] + 0.3 * found["l2"]).backward()
    return found


def only_one_of_several(s):
    found = s.call("losses", s.x, s.y)
    found["l2"].backward()
    return found["ce"]


def sum_of_calls(s):
    total = sum(s.call("loss", x, s.y) for x in (s.x, s.z, s.x * 2)) / 3
    total.backward()
    return total


def separate_backwards(s):
    losses = [s.call("loss", x, s.y) for x in (s.x, s.z)]
    for loss in losses:
        (loss / 2).backward()
    return losses


def layers_around(s):
    hidden = s.call("features", s.stem(s.x))
    out = s.head(s.call("classify", s.mid(hidden)))
    out.square().mean().backward()
    return out


def chained(s):
    logits = s.call("classify", s.call("features", s.x))
    loss = F.cross_entropy(logits, s.y)
    loss.backward()
    return loss


def chained_thrice(s):
    out = s.model(s.call("inverse", s.call("classify", s.call("features", s.x))))
    out.square().sum().backward()
    return out


def chained_and_looked_at(s):
    hidden = s.call("features", s.x)
    logits = s.call("classify", hidden)
    loss = F.cross_entropy(logits, s.y) + hidden.square().mean()
    loss.backward()
    return loss, hidden


def fed_twice(s):
    hidden = s.call("features", s.x)
    (s.call("classify", hidden).sum() + s.call("classify", hidden).square().sum()).backward()


def fed_detached(s):
    hidden = s.call("features", s.x).detach()
    loss = s.call("classify", hidden).square().mean()
    loss.backward()
    return loss


def fed_requires_grad(s):
    hidden = s.call("features", s.x).detach().requires_grad_()
    s.call("classify", hidden).square().mean().backward()
    return hidden.grad


def fed_after_change(s):
    hidden = s.call("features", s.z)
    with torch.no_grad():
        hidden.mul_(0.5)
    loss = s.call("classify", hidden.detach()).square().mean()
    loss.backward()
    return loss


def fed_after_change_of_data(s):
    hidden = s.call("features", s.z).detach()
    hidden.data.mul_(0.5)
    return s.call("classify", hidden)


def fed_after_change_of_numpy(s):
    hidden = s.call("features", s.z).detach()
    hidden.numpy()[0] = 0.25
    return s.call("classify", hidden)


def fed_with_hook(s):
    hidden = s.call("features", s.x)
    seen = []
    hidden.register_hook(lambda g: seen.append(g.clone()))
    s.call("classify", hidden).square().sum().backward()
    return seen


def fed_with_retain_grad(s):
    hidden = s.call("features", s.x)
    hidden.retain_grad()
    s.call("classify", hidden).square().sum().backward()
    return hidden.grad


def fed_with_hook_on_detached(s):
    hidden = s.call("features", s.x).detach()
    hidden.requires_grad = True
    seen = []
    hidden.register_hook(lambda g: seen.append(g.clone()))
    s.call("classify", hidden).sum().backward()
    return seen


def fed_scalar(s):
    loss = s.loss()
    return s.call("classify", s.call("features", s.z) * loss)


def gan(s):
    """A generator step through a discriminator, and a discriminator step on detached fakes."""
    fake = s.call("inverse", s.model(s.z))
    real_loss = F.softplus(-s.model(s.x)).mean()
    fake_loss = F.softplus(s.model(fake.detach())).mean()
    (real_loss + fake_loss).backward()
    generator_loss = F.softplus(-s.model(fake)).mean()
    generator_loss.backward()
    return real_loss, fake_loss, generator_loss


def gan_in_module(s):
    fake = s.call("inverse", s.model(s.z))
    d_loss = s.call("loss", s.x, s.y) + s.call("loss", fake.detach(), s.y)
    d_loss.backward()
    g_loss = s.call("loss", fake, s.y)
    g_loss.backward()
    return d_loss.item(), g_loss.item()


def no_grad_call(s):
    with torch.no_grad():
        out = s.out()
    assert not out.requires_grad
    return out, out.is_leaf, out.grad_fn is None, raises(RuntimeError, out.sum().backward)


def no_grad_loss(s):
    with torch.no_grad():
        loss = s.loss()
    return loss.requires_grad, loss.item(), raises(RuntimeError, loss.backward), loss + 1


def inference_call(s):
    with torch.inference_mode():
        out = s.out()
        value = out.argmax(1)
    return value, out.requires_grad


def output_as_leaf(s):
    with torch.no_grad():
        out = s.out()
    out.requires_grad_()
    (out * s.w).sum().backward()
    return out.grad, out.is_leaf


def no_grad_inside(s):
    out = s.out()
    with torch.no_grad():
        out2 = s.out()
    (out * out2).sum().backward()


def teacher(s):
    with torch.no_grad():
        target = s.model(s.z)
    loss = F.mse_loss(s.model(s.x), target)
    loss.backward()
    return loss


def only_inputs(s):
    (grad,) = torch.autograd.grad(s.out().sum(), s.x)
    return grad


def only_inputs_of_chain(s):
    return torch.autograd.grad(s.call("classify", s.call("features", s.x)).square().sum(), [s.x])


def saliency_then_train(s):
    out = s.out()
    (grad,) = torch.autograd.grad(out.sum(), s.x, retain_graph=True)
    F.cross_entropy(out, s.y).backward()
    return grad


def adversarial(s):
    loss = s.loss()
    (grad,) = torch.autograd.grad(loss, s.x)
    attacked = (s.x + 0.1 * grad.sign()).detach()
    s.call("loss", attacked, s.y).backward()
    return grad


def second_backward_raises(s):
    out = s.out()
    out.sum().backward()
    return raises(RuntimeError, out.sum().backward)


def second_backward_of_chain(s):
    hidden = s.call("features", s.x)
    s.call("classify", hidden).sum().backward()
    return raises(RuntimeError, lambda: s.call("classify", hidden).sum().backward())


def retained_chain(s):
    hidden = s.call("features", s.x)
    out = s.call("classify", hidden)
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()


def checkpointed(s):
    def block(x):
        return s.head(s.model(x))

    checkpoint(block, s.stem(s.x), use_reentrant=False).sum().backward()


def autocast_call(s):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = s.out()
        loss = F.cross_entropy(out.float(), s.y)
    loss.backward()
    return out.float(), loss


def running_sum(s):
    total = 0.0
    for k in range(20):
        total = total + s.call("loss", s.z + k, s.y)
    total.backward()
    return total


def running_sum_in_place(s):
    total = 0.0
    for k in range(20):
        loss = s.call("loss", s.z + k, s.y)
        loss.backward()
        total += loss.detach()
    return total, total / 20


def running_sum_in_tensor(s):
    total = torch.zeros((), dtype=torch.float64)
    for k in range(5):
        loss = s.call("loss", s.z + k, s.y)
        loss.backward()
        total += loss.detach()
    return total


def losses_kept(s):
    kept = []
    for k in range(10):
        loss = s.call("loss", s.z + k, s.y)
        loss.backward()
        kept.append(loss)
    return [loss.item() for loss in kept], sum(kept) / len(kept)


def kinds(s):
    index, mask, number, half = s.call("kinds", s.x)
    return index, mask, number, half, index.dtype == torch.int64, mask.sum(), index == s.y, index.requires_grad


def accuracy(s):
    index = s.call("kinds", s.z)[0]
    return (index == s.y).sum().item(), (index == s.y).float().mean().item(), index.tolist(), index.bincount()


def complex_output(s):
    train(s.call("kinds", s.x)[2])


def half_output(s):
    s.call("kinds", s.x)[3].float().sum().backward()


def frozen_output(s):
    with torch.no_grad():
        return s.call("kinds", s.z)[1]


def ema_of_outputs(s):
    average = torch.zeros(7, 3, dtype=torch.float64)
    for _ in range(3):
        average.mul_(0.9).add_(s.out().detach(), alpha=0.1)
    return average


def preallocated(s):
    buffer = torch.zeros(2, 7, 3, dtype=torch.float64)
    for k in range(2):
        buffer[k] = s.model(s.x * k)
    train(buffer)
    return buffer


def memory_bank(s):
    bank = [s.out() for _ in range(3)]
    torch.stack(bank).sum().backward()
    return torch.cat([b.detach() for b in bank])


def input_without_grad(s):
    s.model(s.z).sum().backward()
    return s.z.grad is None


def input_is_view(s):
    s.model(s.x[[6, 5, 4]]).sum().backward()


def input_twice(s):
    (s.model(s.x) + s.model(s.x * 2)).sum().backward()


def input_in_driver_loss(s):
    (s.out().sum() + s.x.square().sum()).backward()


def frozen_input_needed(s):
    s.x.requires_grad_(False)
    s.out().sum().backward()
    return s.x.grad is None


def detached_scalar_is_constant(s):
    a, b = s.loss(), s.call("loss", s.z, s.y)
    (a * b.detach()).backward()


def weighted_losses(s):
    a, b = s.loss(), s.call("loss", s.z, s.y)
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    (weights[0] * a + weights[1] * b).backward()
    return weights.grad


def stack_of_losses(s):
    losses = torch.stack([s.loss(), s.call("loss", s.z, s.y)])
    losses.max().backward()
    return losses


def hook_then_expression(s):
    a = s.loss()
    seen = []
    a.register_hook(lambda g: seen.append(g.clone()))
    (a + a.item() * a).backward()
    return seen


def change_of_output_leaves_model(s):
    """tanh keeps its output for backward; changing the driver's value must not reach it."""
    hidden = s.call("features", s.x)
    if not s.remote:
        hidden = hidden.clone()
    hidden.mul_(2)
    train(hidden)
    return hidden


def change_of_data_leaves_model(s):
    hidden = s.call("features", s.x)
    if not s.remote:
        hidden = hidden.clone()
    hidden.data.zero_()
    train(hidden)


def change_of_input_after_call(s):
    x = s.z.clone()
    out = s.model(x)
    x.zero_()
    return out


def gradient_changed_later(s):
    out = s.out()
    gradient = s.w.clone()
    out.backward(gradient)
    gradient.zero_()


def scalar_gradient_changed_later(s):
    gradient = torch.tensor(2.0, dtype=torch.float64)
    s.loss().backward(gradient)
    gradient.zero_()


SCRIPTS = [
    mixture,
    mixture_of_parts,
    two_backwards,
    several_losses,
    only_one_of_several,
    sum_of_calls,
    separate_backwards,
    layers_around,
    chained,
    chained_thrice,
    chained_and_looked_at,
    fed_twice,
    fed_detached,
    fed_requires_grad,
    fed_after_change,
    fed_after_change_of_data,
    fed_after_change_of_numpy,
    fed_with_hook,
    fed_with_retain_grad,
    fed_with_hook_on_detached,
    fed_scalar,
    gan,
    gan_in_module,
    no_grad_call,
    no_grad_loss,
    inference_call,
    output_as_leaf,
    no_grad_inside,
    teacher,
    only_inputs,
    only_inputs_of_chain,
    saliency_then_train,
    adversarial,
    second_backward_raises,
    second_backward_of_chain,
    retained_chain,
    checkpointed,
    autocast_call,
    running_sum,
    running_sum_in_place,
    running_sum_in_tensor,
    losses_kept,
    kinds,
    accuracy,
    complex_output,
    half_output,
    frozen_output,
    ema_of_outputs,
    preallocated,
    memory_bank,
    input_without_grad,
    input_is_view,
    input_twice,
    input_in_driver_loss,
    frozen_input_needed,
    detached_scalar_is_constant,
    weighted_losses,
    stack_of_losses,
    hook_then_expression,
    change_of_output_leaves_model,
    change_of_data_leaves_model,
    change_of_input_after_call,
    gradient_changed_later,
    scalar_gradient_changed_later,
]


# Several calls in one backward, onto gradients that exist: the additions have another order, so the last bits differ.
SEVERAL_CALLS_ADD_UP = [gan, gan_in_module]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda f: f.__name__)
def test_script(models, script):
    run(models, script, False if script in SEVERAL_CALLS_ADD_UP else None)


# ---- loud: what cannot be right raises, and leaves the model usable


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def grad_of_parameters(s):
    torch.autograd.grad(s.loss(), list(s.net.parameters()))


def backward_with_inputs_of_parameters(s):
    s.loss().backward(inputs=list(s.net.parameters()))


def create_graph(s):
    torch.autograd.grad(s.loss(), s.x, create_graph=True)


def create_graph_of_output(s):
    torch.autograd.grad(s.out().sum(), s.x, create_graph=True)


def backward_create_graph(s):
    s.loss().backward(create_graph=True)


def hook_after_feeding(s):
    hidden = s.call("features", s.x)
    out = s.call("classify", hidden)
    hidden.register_hook(lambda g: g)
    out.sum().backward()


def retain_grad_after_feeding(s):
    hidden = s.call("features", s.x)
    out = s.call("classify", hidden)
    hidden.retain_grad()
    out.sum().backward()


def grad_of_fed(s):
    hidden = s.call("features", s.x)
    torch.autograd.grad(s.call("classify", hidden).sum(), hidden, allow_unused=True)


def grad_of_sibling(s):
    logits, loss = s.call("both", s.x, s.y)
    torch.autograd.grad(loss, logits, allow_unused=True)


def grad_of_sibling_too(s):
    logits, loss = s.call("both", s.x, s.y)
    torch.autograd.grad(loss + logits.sum(), logits)


def hook_beside_sibling(s):
    logits, loss = s.call("both", s.x, s.y)
    logits.register_hook(lambda g: None)
    (loss + logits.sum()).backward()


def retain_grad_beside_sibling(s):
    logits, loss = s.call("both", s.x, s.y)
    logits.retain_grad()
    (loss + logits.sum()).backward()


LOUD = [
    grad_of_parameters,
    backward_with_inputs_of_parameters,
    create_graph,
    create_graph_of_output,
    backward_create_graph,
    hook_after_feeding,
    retain_grad_after_feeding,
    grad_of_fed,
    grad_of_sibling,
    grad_of_sibling_too,
    hook_beside_sibling,
    retain_grad_beside_sibling,
]


@pytest.mark.parametrize("script", LOUD, ids=lambda f: f.__name__)
def test_loud(models, script):
    with pytest.raises(UnsupportedError):
        script(models.sides()[1])
    run(models, mixture)


@pytest.mark.parametrize(
    "use",
    [
        Reverse.apply,
        lambda o: checkpoint(torch.tanh, o, use_reentrant=True),
        torch.vmap(lambda row: row * 2),
        lambda o: SCRIPTED(o, torch.ones(())),
    ],
)
def test_code_below_python(models, use):
    """What torch calls without asking Python sees the values; a gradient raises, and is right through fetch()."""
    with pytest.raises(RuntimeError, match="invalid gradient"):
        use(models.sides()[1].out()).sum().backward()
    run(models, lambda s: train(use(s.out().fetch() if s.remote else s.out()).detach()))
    plain, remote = models.sides()
    Reverse.apply(plain.out()).sum().backward()
    Reverse.apply(remote.out().fetch()).sum().backward()
    assert_same(remote.gradients(), plain.gradients(), models.workers == 0)


# ---- what stays remote, and what is let go


@pytest.fixture
def remote(models):
    return models.sides()[1]


def messages(s: Side) -> int:
    s.model._stream.finish()
    return s.model._stream.num_messages


def trusted(s: Side) -> None:
    """Make the kinds of calls known, so that a call by itself waits for nothing."""
    for _ in range(4):
        s.model(s.z)
        s.call("both", s.z, s.y)
        s.call("loss", s.z, s.y)


@pytest.mark.parametrize(
    "use",
    [
        lambda out, loss: loss.backward(),
        lambda out, loss: (loss / 4).backward(),
        lambda out, loss: (2 * loss + 1 - loss.detach()).mean().backward(),
        lambda out, loss: (loss + torch.ones(()) * 0.5).backward(),
        lambda out, loss: (loss * torch.tensor(0.5)).backward(),
        lambda out, loss: loss.mul_(2).backward(),
        lambda out, loss: sum([loss, loss]).backward(),
        lambda out, loss: torch.autograd.backward([loss, loss]),
        lambda out, loss: (loss.detach(), out.detach()),
        lambda out, loss: (out.dtype, out.device, out.ndim, out.dim(), loss.shape, out.requires_grad, hash(out)),
        lambda out, loss: (isinstance(out, torch.Tensor), torch.is_tensor(out), out.is_floating_point()),
        lambda out, loss: loss.register_hook(lambda g: None),
        lambda out, loss: (loss.retain_grad(), loss.backward(), loss.grad),
        lambda out, loss: (loss.item, out.fetch),
    ],
)
def test_stays_remote(models, remote, use):
    trusted(remote)
    before = messages(remote)
    sent = remote.model._stream.num_messages
    out, loss = remote.call("both", remote.z, remote.y)
    use(out, loss)
    assert sent == before == remote.model._stream.num_messages


def test_shape_costs_metadata_only(models, remote):
    """Before trust shapes come unasked; afterwards they cost one message, and never the values."""
    trusted(remote)
    out, _ = remote.call("both", remote.z, remote.y)
    before = messages(remote)
    sizes = []
    remote.model._stream.reply_bytes = lambda reply: sizes.append(len(pickle.dumps(reply)))
    big = remote.call("both", remote.z.repeat(2000, 1), remote.y.repeat(2000))[0]
    assert tuple(big.shape) == (14000, 3)
    assert big.size(0) == 14000
    assert big.numel() == 42000
    assert len(big) == 14000
    remote.model._stream.reply_bytes = None
    workers = remote.model._stream.group.size
    assert remote.model._stream.num_messages - before == workers
    assert max(sizes) < 1000
    assert out.fetch() is out.fetch()


def test_values_are_fetched_once(models, remote):
    trusted(remote)
    out = remote.model(remote.z)
    out + 1
    before = messages(remote)
    out * 2, out.detach() + 1, out[0].tolist(), out.numpy(force=True)
    assert messages(remote) == before


def test_feeding_moves_no_values(models, remote):
    trusted(remote)
    sizes = []
    for _ in range(4):
        hidden = remote.call("features", remote.z.repeat(1000, 1))
        out = remote.call("classify", hidden)
        remote.call("loss", remote.call("inverse", out), remote.y.repeat(1000)).backward()
    remote.model._stream.reply_bytes = lambda reply: sizes.append(len(pickle.dumps(reply)))
    hidden = remote.call("features", remote.z.repeat(1000, 1))
    out = remote.call("classify", hidden)
    remote.call("loss", remote.call("inverse", out), remote.y.repeat(1000)).backward()
    remote.model._stream.finish()
    remote.model._stream.reply_bytes = None
    assert hidden._value is None
    assert out._value is None
    assert max(sizes) < 1500


def test_running_sum_over_many_steps(models, remote):
    """Depth stays bounded, nothing waits for a step that was just recorded, and the sum is right."""
    trusted(remote)
    total: Any = 0.0
    expected = []
    waits = 0
    optimizer = torch.optim.SGD(remote.net.parameters(), lr=0.0)
    for k in range(200):
        loss = remote.call("loss", remote.z + k / 100, remote.y)
        loss.backward()
        optimizer.step()
        fresh = not loss.is_known()
        sent = remote.model._stream.num_messages
        total += loss.detach()
        waits += fresh and sent != remote.model._stream.num_messages
        assert total._box.term.depth <= MAX_DEPTH
        expected.append(loss)
    assert float(total) == pytest.approx(sum(x.item() for x in expected), rel=1e-12)
    assert waits == 0


def test_running_sum_that_was_looked_at(models, remote):
    """A printed sum goes on without waiting for each later step."""
    trusted(remote)
    total = remote.call("loss", remote.z, remote.y).detach()
    total.item()
    loss = remote.call("loss", remote.z, remote.y)
    before = messages(remote)
    loss = remote.call("loss", remote.z, remote.y)
    total = total + loss.detach()
    total += loss.detach() * 2
    assert not loss.is_known()
    assert remote.model._stream.num_messages == before
    assert total.item() == pytest.approx(4 * loss.item(), rel=1e-12)


def test_dropped_outputs_free_the_workers(models):
    gc.collect()
    s = models.sides()[1]
    s.call("features", s.z)  # the model itself keeps the last call's loss, for model.backward()
    before = models.live_calls()
    gc.disable()
    try:
        out, loss = s.call("both", s.x, s.y)
        hidden = s.call("features", s.x)
        fed = s.call("classify", hidden)
        out + 1, loss + 1, (loss / 2).detach(), out.shape
        total = loss * 0.5 + fed.sum()
        assert models.live_calls() == before + 3
        total.backward()
        watch = [weakref.ref(t) for t in (out, loss, hidden, fed)]
        del out, loss, hidden, fed, total
        assert not any(ref() is not None for ref in watch)
        assert models.live_calls() == before
    finally:
        gc.enable()


def test_kept_detached_loss_frees_the_graph(models):
    """A list of losses keeps numbers, not graphs, once they are known."""
    gc.collect()
    s = models.sides()[1]
    s.call("features", s.z)  # the model itself keeps the last call's loss, for model.backward()
    before = models.live_calls()
    kept = []
    for _ in range(5):
        loss = s.call("loss", s.z, s.y)
        loss.backward()
        kept.append(loss.detach() if len(kept) < 3 else 2 * loss.detach() - loss.detach())
        del loss
    s.call("features", s.z)
    values = [float(k) for k in kept]
    assert len(set(values)) == 1
    assert models.live_calls() == before


def test_a_count_needs_a_reduction(models, remote):
    out, count = remote.call("count", remote.z)
    assert out.shape == (ROWS, 3)
    assert [int(c) for c in count.shards] == ([7] if models.workers == 0 else [3, 2, 2])
    if models.workers == 0:
        assert count.item() == 7
        return
    for look in (lambda: count.item(), lambda: count + 1, lambda: f"{count}", lambda: bool(count)):
        with pytest.raises(GatherError, match="reduction"):
            look()


def test_shards_are_differentiable(models):
    plain, s = models.sides()
    out = s.out()
    cuts = (7,) if models.workers == 0 else (3, 2, 2)
    assert [len(part) for part in out.shards] == list(cuts)
    sum((part * (k + 1)).sum() for k, part in enumerate(out.shards)).backward()
    factors = torch.tensor(list(itertools.chain(*([k + 1] * n for k, n in enumerate(cuts)))), dtype=torch.float64)
    (plain.out() * factors[:, None]).sum().backward()
    assert_same(s.gradients(), plain.gradients(), models.workers == 0)


def test_repr_of_types(remote):
    out = remote.out()
    assert isinstance(out, RemoteTensor)
    assert type(out + 0) is torch.Tensor
    assert isinstance(out.detach(), RemoteTensor)
    assert type(out.detach().fetch()) is torch.Tensor

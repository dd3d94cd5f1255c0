"""Gradients as views of contiguous buckets, reduced in a fixed order while backward runs.

Runs on the worker, one object per module. Nothing crosses by itself: the caller hands in `start`, which begins the sum
of some tensors over all ranks and returns a handle.

`.grad` of every trainable parameter is a view into a flat bucket; the buckets follow the reverse order of registration,
which is about the order in which backward finishes the gradients (the layout of PyTorch's DDP, arXiv 2006.15704). Hooks
on the accumulated gradients start a bucket's sum as soon as it is full. The last bucket always waits for the end and
takes the caller's tail along, so that every rank starts the same sums in the same order.

Invariants: a gradient is None on all ranks or on none after a reduction; after a reduction only rank 0 keeps the sum as
its local part, so that the next sum does not count it once per rank; what was there at the last commit can be restored
(`undo`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from .errors import UnsupportedError

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


class Handle(Protocol):
    """A sum in progress."""

    def wait(self) -> None:
        """Return when the sum is complete on this rank."""


Start = Callable[[Sequence[Tensor]], Handle]


class Bucket:
    """A flat tensor and the parameters whose gradients are its parts."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in parameters]
        first = parameters[0][1]
        self.flat = torch.zeros(sum(p.numel() for _, p in parameters), dtype=first.dtype, device=first.device)
        self.views: dict[str, Tensor] = {}
        offset = 0
        for name, p in parameters:
            part = self.flat[offset : offset + p.numel()]
            self.views[name] = part.as_strided(p.shape, p.stride(), offset) if _is_dense(p) else part.view(p.shape)
            offset += p.numel()
        self.left = 0


def _is_dense(p: Tensor) -> bool:
    """Whether the elements fill their memory in some order of the dimensions (channels last does)."""
    order = sorted(range(p.ndim), key=p.stride, reverse=True)
    return p.numel() > 0 and p.detach().permute(order).is_contiguous()


class Buckets:
    """The gradients of one module on one rank.

    Args:
        parameters: all parameters by name, in the order of registration; those that require no gradient get no place.
        rank: this worker's rank; rank 0 keeps the sum after a reduction.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], rank: int) -> None:
        self.parameters = dict(parameters)
        self.rank = rank
        self.buckets: list[Bucket] = []
        self.present: dict[str, bool] = {}
        self.pending = False  # local contributions that no reduction has summed yet
        self._where: dict[str, Bucket] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._start: Start | None = None
        self._next = 0
        self._handles: list[Handle] = []
        self._fired: set[str] = set()
        self._reduced = True
        self._committed: dict[str, bool] = {}
        self._base: list[Tensor] | None = None
        self._touched = False
        self.rebuild()

    def rebuild(self, also: str = "") -> None:
        """Lay the buckets out anew for all parameters that require gradients now, that have one, and for `also`.

        Gradients that exist move along.
        """
        old = {name: self.grad(name) for name in self.present}
        for hook in self._hooks:
            hook.remove()
        trainable = [(n, p) for n, p in self.parameters.items() if p.requires_grad or self.present.get(n) or n == also]
        groups: list[list[tuple[str, nn.Parameter]]] = []
        open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[tuple[str, nn.Parameter]], list[int]]] = {}
        for name, p in reversed(trainable):
            key = (p.dtype, p.device)
            if key not in open_groups:
                open_groups[key] = ([], [0, FIRST_BUCKET_BYTES if not groups else BUCKET_BYTES])
                groups.append(open_groups[key][0])
            members, size = open_groups[key]
            members.append((name, p))
            size[0] += p.numel() * p.element_size()
            if size[0] >= size[1]:
                del open_groups[key]
        self.buckets = [Bucket(members) for members in groups]
        self._where = {name: bucket for bucket in self.buckets for name in bucket.names}
        self.present = dict.fromkeys(self._where, False)
        for name, grad in old.items():
            if grad is not None and name in self._where:
                self._where[name].views[name].copy_(grad)
                self.present[name] = True
        for name, p in self.parameters.items():
            p.grad = self._where[name].views[name] if self.present.get(name) else None
        hooked = [(name, p) for name, p in trainable if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(name)) for name, p in hooked]
        self.committed()

    def grad(self, name: str) -> Tensor | None:
        """The gradient of `name`, None where plain PyTorch has None."""
        return self._where[name].views[name] if self.present.get(name) else None

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        bucket = self._where[name]
        view = bucket.views[name]

        def accumulated(p: Tensor) -> None:
            grad = p.grad
            if grad is not view and grad is not None:
                if grad.layout is not torch.strided:
                    p.grad = None
                    raise UnsupportedError(
                        f"the gradient of parameter '{name}' is sparse ({grad.layout}); gradients travel in dense "
                        "buckets: build the embedding with sparse=False"
                    )
                view.copy_(grad)
                p.grad = view
            self.present[name] = True
            if self._start is not None and name not in self._fired:
                self._fired.add(name)
                bucket.left -= 1
                self._launch_full()
            elif name in self._fired and self._is_launched(bucket):
                raise UnsupportedError(
                    f"the gradient of parameter '{name}' changed after its reduction had begun (reentrant "
                    "checkpointing with tied weights does that): use torch.utils.checkpoint with use_reentrant=False"
                )

        return accumulated

    def _is_launched(self, bucket: Bucket) -> bool:
        return self.buckets.index(bucket) < self._next

    def _launch_full(self) -> None:
        while self._next < len(self.buckets) - 1 and self.buckets[self._next].left == 0:
            self._launch()

    def _launch(self, *more: Tensor) -> None:
        assert self._start is not None
        tensors = list(more)
        if self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            absent = [bucket.views[n] for n in bucket.names if not self.present[n]]
            if absent:
                torch._foreach_zero_(absent)
            tensors.insert(0, bucket.flat)
            self._next += 1
        self._handles.append(self._start(tensors))

    def begin_local(self) -> None:
        """Make ready for gradients of this rank alone: keep what the last commit left, and count a sum only once."""
        self.pending = True
        if not self._reduced:
            return
        self._reduced = False
        if any(self.present.values()):
            if self._base is None and not self._touched:
                self._base = [bucket.flat.clone() for bucket in self.buckets]
            if self.rank:
                for bucket in self.buckets:
                    bucket.flat.zero_()
        self._touched = True

    def arm(self, start: Start) -> None:
        """Let the backward that follows start the sums by itself, as buckets become full."""
        self._start = start
        self._fired.clear()
        for bucket in self.buckets:
            bucket.left = len(bucket.names)

    def finish(self, start: Start, tail: Tensor) -> None:
        """Sum what is left, and `tail` with the last bucket; wait until all sums are complete on this rank."""
        self._start = start
        while self._next < len(self.buckets) - 1:
            self._launch()
        self._launch(tail)
        handles = self.disarm()
        for handle in handles:
            handle.wait()

    def disarm(self) -> list[Handle]:
        """Forget a reduction in progress; returns the handles that were open."""
        handles, self._handles = self._handles, []
        self._start, self._next = None, 0
        self._fired.clear()
        return handles

    def settle(self, present: Iterable[bool]) -> None:
        """After a reduction: the buckets hold the sums, and `present` says which gradients are not None anywhere."""
        self.present = dict(zip(self.present, present, strict=True))
        for name, here in self.present.items():
            self.parameters[name].grad = self._where[name].views[name] if here else None
        self._reduced, self.pending = True, False

    def zero(self, names: Iterable[str], to_none: bool) -> None:
        """Set gradients to None, or to zeros where they are not None and `to_none` is False."""
        for name in names:
            if not self.present.get(name):
                continue
            if to_none:
                self.present[name] = False
                self.parameters[name].grad = None
            else:
                if self._reduced:
                    self.begin_local()
                self._where[name].views[name].zero_()

    def add(self, name: str, grad: Tensor) -> None:
        """Add to the local gradient of `name` on this rank (to be called after `begin_local`)."""
        if name not in self._where:
            return
        view = self._where[name].views[name]
        if self.present[name]:
            view.add_(grad)
        else:
            view.copy_(grad)
        self.present[name] = True
        self.parameters[name].grad = view

    def write(self, name: str, grad: Tensor) -> None:
        """Overwrite the reduced gradient of `name`, on all ranks alike."""
        if name not in self._where:
            self.rebuild(also=name)  # a frozen parameter that is given a gradient
        view = self._where[name].views[name]
        if grad is not view:
            view.copy_(grad)
        self.present[name] = True
        self.parameters[name].grad = view

    def committed(self) -> None:
        """Take the present gradients as those of the last commit."""
        self._committed = dict(self.present)
        self._base, self._touched = None, False

    def undo(self) -> None:
        """Go back to the last commit. Gradients whose memory was used again after a zero_grad become None."""
        self.disarm()
        if self._base is not None:
            for bucket, flat in zip(self.buckets, self._base, strict=True):
                bucket.flat.copy_(flat)
        lost = self._touched and self._base is None
        self.settle(here and not lost for here in self._committed.values())
        self.committed()

"""Reductions among workers through torch's process groups: NCCL on GPUs, Gloo on CPUs.

Runs on the workers. It makes torch's default group of the process, in which SyncBatchNorm, DDP, FSDP2 and DTensor work,
and two groups of its own for gradients, so that these never interleave with what the user's modules do in the default
group.

What crosses: for CPU tensors of W ranks, 2 (W-1)/W of their bytes out of each rank, as in a ring.

Invariant: on CPUs the sum of an element is ((x0 + x1) + x2) + ... in rank order, wherever it lies in whichever tensor:
the ranks exchange shares, each sums its own share in rank order, and all gather the sums. Two ranks use Gloo's own
all-reduce where it has the dtype, since x0 + x1 has one order only. It is the same sum as in `shared_memory.py`. On
GPUs the order is NCCL's.

Gloo cannot abort, and a rank that is no neighbour of a dead one would wait out the timeout. So reductions, gathers
and barriers connect each rank with each, every wait looks at the stop flag and the deadline, and whoever fails leaves
its groups at once, which closes its connections. Operations that are stuck are left to a daemon thread until they end;
they may still write into their tensors meanwhile, so the tensors of a failed group must not be used again.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from .errors import CollectiveError
from .rendezvous import Wait, Watch, first_line

_GLOO_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
_SLICE = timedelta(milliseconds=20)
_GRACE_S = 5.0  # torch's own timeout comes after ours, only to end what was left behind


class _Sum:
    """One contiguous 1-D tensor on its way through a reduction."""

    def __init__(self, group: TorchTransport, target: Tensor) -> None:
        self._group = group
        self._target = target
        on_host = target.device.type == "cpu"
        self.flat = target if on_host or group.nccl else target.cpu()
        self._own = self._all = self.flat[:0]
        native = self.flat.device.type != "cpu" or (group.size == 2 and self.flat.dtype in _GLOO_DTYPES)
        self.last_step = native  # True once `work` is the last operation of this sum
        self.work = group.issue(dist.all_reduce, self.flat) if native else self._exchange_shares()

    def _exchange_shares(self) -> Any:
        size, rank, count = self._group.size, self._group.rank, self.flat.numel()
        part = -(-count // size)
        lengths = [max(0, min(part, count - r * part)) * self.flat.element_size() for r in range(size)]
        self._own = self.flat.new_empty(size, lengths[rank] // self.flat.element_size())
        self._all = self.flat if count == part * size else self.flat.new_empty(part * size)
        return self._group.issue(
            dist.all_to_all_single,
            _bytes(self._own),
            _bytes(self.flat),
            [lengths[rank]] * size,
            lengths,
        )

    def sum_and_gather(self) -> None:
        """Sum the own share, which has come, in rank order, and start to gather all of them."""
        self.work.wait()
        size = self._group.size
        total = self.flat.new_zeros(self._all.numel() // size)
        mine = total[: self._own.shape[1]]
        mine.copy_(self._own[0])
        for rank in range(1, size):
            mine.add_(self._own[rank])
        self.last_step = True
        self.work = self._group.gather(self._all, total, second=True)

    def put(self) -> None:
        """Put the complete sum into the target."""
        if self._all.numel() and self._all is not self.flat:
            self.flat.copy_(self._all[: self.flat.numel()])
        if self.flat is not self._target:
            self._target.copy_(self.flat)


class TorchHandle:
    """A reduction under way; see `TorchTransport.all_reduce`."""

    def __init__(
        self, group: TorchTransport, sums: list[_Sum], what: str, copies: list[tuple[list[Tensor], Tensor]]
    ) -> None:
        self._group = group
        self._sums = sums
        self._what = what
        self._copies = copies

    def done(self) -> bool:
        """Carry the reduction on without waiting; True if `wait` would return at once."""
        if self._sums:
            with self._group.guard(self._what):
                self._group.pump()
        return all(s.last_step and s.work.is_completed() for s in self._sums)

    def wait(self) -> None:
        """Wait until the sums are in the tensors. Raises CollectiveError (peer lost, deadline, stop).

        On a GPU the host waits, and the current stream is ordered behind the reduction.
        """
        if not self._sums:
            return
        with self._group.guard(self._what) as wait:
            for each in self._sums:
                self._group.finish(each, wait)
        for targets, flat in self._copies:
            pieces = torch.split(flat, [t.numel() for t in targets])
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece.view(target.shape))
        self._sums, self._copies = [], []


class _Guard:
    """Turns whatever a torch collective raises into a CollectiveError, and makes the group leave."""

    def __init__(self, group: TorchTransport, wait: Wait) -> None:
        self._group = group
        self._wait = wait

    def __enter__(self) -> Wait:
        return self._wait

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, RuntimeError):
            return
        failure = (
            error if isinstance(error, CollectiveError) else self._wait.error(f"a peer is gone ({first_line(error)})")
        )
        self._group.abandon(str(failure))
        if failure is not error:
            raise failure from error


class TorchTransport:
    """A `Collective` over torch's process groups; all ranks must start the same operations in the same order.

    Args:
        store: rendezvous keys of this group alone (a PrefixStore).
        rank, size: this process and the number of all.
        device: of the gradients; NCCL is used for CUDA tensors where `nccl` is True, Gloo through host memory else.
        watch: ends the waits.
        own_groups: False makes the default group only, and uses it for everything.

    Making it is a collective operation among all ranks and costs some 10 ms. Raises CollectiveError where a peer or the
    store is lost meanwhile, or where this process has a default group already.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        watch: Watch,
        *,
        nccl: bool,
        own_groups: bool = True,
    ) -> None:
        self.rank = rank
        self.size = size
        self.note = ""
        self.nccl = nccl
        self._watch = watch
        self._device = device
        self._failure = ""
        self._works: list[Any] = []
        self._sums: deque[_Sum] = deque()
        self._first: Any = None
        self._second: Any = None
        if dist.is_initialized():
            raise CollectiveError(
                f"{watch.where()} can not be formed: this process has a default torch process group already; "
                "close the older group, or call torch.distributed.destroy_process_group() first"
            )
        if nccl:
            _tame_nccl(device)
        backend = "cpu:gloo,cuda:nccl" if nccl else "cpu:gloo"
        timeout = timedelta(seconds=watch.timeout_s + _GRACE_S)
        with self.guard("forming the group"):
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            if own_groups:
                self._first = dist.new_group(backend=backend, timeout=timeout)
                self._second = dist.new_group(backend=backend, timeout=timeout)
        if nccl:
            self.all_reduce([torch.zeros(1, device=device)]).wait()  # connects now, under our deadline

    def all_reduce(self, tensors: Sequence[Tensor]) -> TorchHandle:
        """Start to sum each tensor in place over the ranks. The tensors must stay as they are until `wait` returns.

        One operation for each dtype and device; tensors that are alone in theirs, and contiguous, are not copied.
        """
        what = f"all_reduce of {_describe(tensors)}"
        sums, copies = [], []
        with self.guard(what):
            for group in _alike(tensors):
                flat = group[0].view(-1) if len(group) == 1 and group[0].is_contiguous() else None
                if flat is None:
                    flat = torch.cat([t.reshape(-1) for t in group])
                    copies.append((group, flat))
                sums.append(_Sum(self, flat))
                self._sums.append(sums[-1])
            self.pump()
        return TorchHandle(self, sums, what, copies)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order; equal shapes and dtypes on all. Blocks."""
        sent = self._reachable(tensor.detach()).contiguous()
        received = sent.new_empty((self.size, *sent.shape))
        with self.guard(f"all_gather of {_describe([tensor])}") as wait:
            if sent.numel():
                self.await_work(self.gather(received, sent), wait)
        return list(received.to(tensor.device).unbind(0))

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite the tensors on all ranks with those of rank `source`. Blocks; one operation for each tensor."""
        plain = [tensor.detach() for tensor in tensors]
        sent = [self._reachable(tensor).contiguous() for tensor in plain]
        with self.guard(f"broadcast of {_describe(tensors)} from rank {source}") as wait:
            works = [self.issue(dist.broadcast, _bytes(each), source) for each in sent if each.numel()]
            for work in works:
                self.await_work(work, wait)
        if self.rank != source:
            for target, each in zip(plain, sent, strict=True):
                if each.data_ptr() != target.data_ptr():
                    target.copy_(each)

    def barrier(self) -> None:
        """Return when all ranks have come here. Blocks."""
        with self.guard("barrier") as wait:
            self.await_work(self.gather(torch.empty(self.size), torch.zeros(1)), wait)

    def point_to_point(self, operation: Any, tensor: Tensor, peer: int) -> None:
        """Run `dist.isend` or `dist.irecv` on a contiguous tensor and wait for it."""
        sent = self._reachable(tensor)
        with self.guard(f"{operation.__name__} of {_describe([tensor])} with rank {peer}") as wait:
            self.await_work(operation(sent, peer, group=self._first), wait)
        if sent is not tensor:
            tensor.copy_(sent)

    def close(self) -> None:
        """Leave all groups of this process, the default one included. Repeated calls do nothing."""
        if not self._failure:
            self.abandon("it was closed", abort=False)

    # For handles

    def guard(self, what: str) -> _Guard:
        """A context in which any failure of a collective ends this group."""
        if self._failure:
            raise CollectiveError(f"{self._watch.where()} can not be used any more: {self._failure}. Join a new group")
        return _Guard(self, self._watch.begin(what))

    def issue(self, operation: Any, *args: Any, second: bool = False) -> Any:
        """Start one of torch's collectives in the first or second gradient group."""
        work = operation(*args, group=self._second if second else self._first, async_op=True)
        self._works = [w for w in self._works if not w.is_completed()]
        self._works.append(work)
        return work

    def gather(self, received: Tensor, sent: Tensor, second: bool = False) -> Any:
        """Start to fill `received` with `sent` of every rank, in rank order.

        Not by a ring on CPUs: every rank talks to every other in each operation, so that all notice a dead one at once.
        """
        if sent.device.type != "cpu":
            return self.issue(dist.all_gather_single, _bytes(received), _bytes(sent), second=second)
        return self.issue(dist.all_to_all_single, _bytes(received), _bytes(sent).repeat(self.size), second=second)

    def pump(self) -> None:
        """Start the gathering of all sums whose shares are here, in order: so its order is alike on all ranks."""
        while self._sums:
            each = self._sums[0]
            if not each.last_step:
                if not each.work.is_completed():
                    return
                each.sum_and_gather()
            self._sums.popleft()

    def finish(self, each: _Sum, wait: Wait) -> None:
        """Wait for one sum, and for the shares of those before it."""
        self.pump()
        while not each.last_step:
            self.await_work(self._sums[0].work, wait)
            self.pump()
        self.await_work(each.work, wait)
        each.put()

    def await_work(self, work: Any, wait: Wait) -> None:
        """Wait for one of torch's operations; raises what it raises, or CollectiveError at deadline and stop."""
        if self.nccl:
            turns = 0
            while not work.is_completed():
                wait.check()
                turns += 1
                time.sleep(0 if turns < 200 else 0.0001)
            failure = work.exception()  # NCCL's work counts as completed when it failed, and `wait` would not tell
            if failure is not None:
                raise RuntimeError(str(failure))
            work.wait()
            return
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # its own failure, unless it completed just now
                    return
            wait.check()

    def abandon(self, why: str, abort: bool = True) -> None:
        """Leave the groups at once; what is still under way is left to a daemon thread until torch ends it."""
        if self._failure:
            return
        self._failure = why
        stuck = [work for work in self._works if not work.is_completed()]
        held = [stuck, list(self._sums), self._first, self._second, dist.group.WORLD if stuck else None]
        self._works, self._first, self._second = [], None, None
        self._sums.clear()
        if not dist.is_initialized():
            return
        if self.nccl and abort:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        if stuck:
            threading.Thread(target=_outlive, args=(stuck, held), name="torchdl-abandoned", daemon=True).start()

    def _reachable(self, tensor: Tensor) -> Tensor:
        return tensor if self.nccl or tensor.device.type == "cpu" else tensor.cpu()


def _outlive(stuck: list[Any], held: list[Any]) -> None:
    """Keep groups and buffers of stuck operations: dropping a group would wait for them and hold Python meanwhile."""
    while not all(work.is_completed() for work in stuck):
        time.sleep(0.1)
    held.clear()


def _tame_nccl(device: torch.device) -> None:
    """Failures are ours to handle: NCCL's watchdog and its monitor would end the process."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    torch.cuda.set_device(device)


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    return list(groups.values())


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: Gloo knows only some dtypes."""
    return tensor.reshape(-1).view(torch.uint8)


def _describe(tensors: Sequence[Tensor]) -> str:
    size_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return f"{len(tensors)} tensors, {size_bytes:,} bytes,"

"""Runs the ranks of a group as processes of their own, which tests may kill and stop.

A server process imports torch (with the part that DDP loads late) and Ray once, and forks the ranks, so that starting
four takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from torchdl_ray.collective import Rendezvous, host_store
from torchdl_ray.errors import CollectiveError

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torchdl_ray.collective", "torch._dynamo"])


class Failed(Exception):
    """A rank's body raised; the text is its traceback."""


class Ranks:
    """`size` processes that run `body(rank, rendezvous, tell, *args)`; use it in a `with` statement.

    `tell(value)` sends a value before the end. `heard(rank)` is the next thing that a rank told or returned: a value,
    or a CollectiveError that it raised.
    """

    def __init__(self, size: int, body: Callable[..., Any], *args: Any, absent: tuple[int, ...] = (), **fields: Any):
        self.store = host_store(10)
        start = Rendezvous(self.store.host, self.store.port, "group-0", size, ("node",) * size, timeout_s=20.0)
        rendezvous = replace(start, **fields)
        self.size = size
        self.pipes: dict[int, Any] = {}
        self.processes: dict[int, Any] = {}
        for rank in range(size):
            if rank not in absent:
                self.pipes[rank], theirs = CONTEXT.Pipe()
                process = CONTEXT.Process(target=_run, args=(theirs, body, rank, rendezvous, args), daemon=True)
                process.start()
                theirs.close()
                self.processes[rank] = process

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(5)
        self.store.close()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        os.kill(self.processes[rank].pid, number)

    def heard(self, rank: int, timeout_s: float = 30.0) -> Any:
        """What the rank says next. Raises Failed with its traceback, TimeoutError, EOFError if it died."""
        if not self.pipes[rank].poll(timeout_s):
            raise TimeoutError(f"rank {rank} said nothing for {timeout_s} s")
        kind, value = self.pipes[rank].recv()
        if kind == "failed":
            raise Failed(f"rank {rank}:\n{value}")
        return value

    def heard_from_all(self, timeout_s: float = 30.0, but: tuple[int, ...] = ()) -> list[Any]:
        """What all ranks say next, in rank order."""
        end = time.monotonic() + timeout_s
        return [self.heard(r, max(0.0, end - time.monotonic())) for r in self.pipes if r not in but]


def _run(pipe: Any, body: Callable[..., Any], rank: int, rendezvous: Rendezvous, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(("value", body(rank, rendezvous, lambda value: pipe.send(("value", value)), *args)))
    except CollectiveError as error:
        pipe.send(("value", error))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # stay, with all connections open, until the parent ends this process
    os._exit(0)

"""Where the members of a group meet, and what ends their waiting.

Runs on both sides: the driver holds the `Store`, so no rank is special and every worker may die; the workers connect to
it by a `Rendezvous`, exchange a few short strings while the group forms, and watch a `StopFlag`.

What crosses: two or three strings per rank and generation; then one question of some bytes every 50 ms while a worker
lives, answered by a thread of the store's own, not by the driver's Python.

Invariant: every wait of a group goes through a `Wait`, so it ends at its deadline or when the driver says stop,
whichever is first, and the error says what was waited for, on which rank, in which group, and for how long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import ray
from torch.distributed import Store as KeyStore  # type: ignore[attr-defined]
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .errors import ArgumentError, ClosedError, CollectiveError

Stop = Callable[[], str | None]
"""Asked often while waiting, so it has to be cheap: None, or the reason why the wait must end."""

POLL_S = 0.02


def never_stop() -> str | None:
    """A `Stop` for members that nobody stops."""
    return None


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """All that a worker needs to join a group; pickles.

    Args:
        host, port: of the driver's store.
        name: unique in the cluster for each generation; it is also the group's name in Ray's registry.
        size: the number of ranks.
        nodes: the node id of each rank, in rank order.
        backend: "auto", "gloo", "nccl", "shared_memory", or a name of Ray's own registry, which is in capitals
            ("GLOO" is Ray's stock group, "gloo" is ours).
        timeout_s: limit of every wait in this group, set-up included.

    Raises: ArgumentError where the values do not fit together.
    """

    host: str
    port: int
    name: str
    size: int
    nodes: tuple[str, ...]
    backend: str = "auto"
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.size < 1 or len(self.nodes) != self.size:
            raise ArgumentError(
                f"a group of size {self.size} got {len(self.nodes)} node ids; expected one node id for each rank"
            )
        if not self.name or self.timeout_s <= 0:
            raise ArgumentError(
                f"a group needs a name and a positive timeout_s, got name={self.name!r}, timeout_s={self.timeout_s}"
            )

    def connect(self) -> TCPStore:
        """Connect to the driver's store: one message. Raises CollectiveError where it does not answer in time."""
        try:
            return TCPStore(
                self.host,
                self.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=self.timeout_s),
            )
        except RuntimeError as error:
            raise CollectiveError(
                f"no connection to the driver's store at {self.host}:{self.port} for group {self.name!r}: "
                f"{first_line(error)}. The driver may have ended, or the port is blocked between the nodes"
            ) from error


class Store:
    """The driver's end of the rendezvous: it holds the keys, can stop a generation, and frees set-ups by closing.

    Make it with `host_store`.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self.host = host
        self._store: TCPStore | None = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self.port: int = self._store.port

    def stop(self, generation: int, reason: str) -> None:
        """Tell the members of `generation` to leave their waits; each sees it within about 50 ms.

        Args: reason: short text, for the workers' errors. Raises: ClosedError after `close`.
        """
        if self._store is None:
            raise ClosedError(f"the store at {self.host}:{self.port} is closed; its groups were freed by that")
        self._store.set(_stop_key(generation), reason or "stopped by the driver")

    def close(self) -> None:
        """Drop the store. Ranks that still wait in it for a set-up fail at once. Repeated calls do nothing."""
        self._store = None


def host_store(timeout_s: float = 60.0) -> Store:
    """Open a store in this process, on a free port, at an address that the workers reach.

    Args: timeout_s: how long the store's own clients wait for a key. Raises: RuntimeError where no port can be had.
    """
    host = str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"  # type: ignore[no-untyped-call]
    return Store(host, timeout_s)


class StopFlag:
    """A `Stop` for workers: says why the driver wants generation `generation` to end, or that the driver is gone.

    A daemon thread asks the store every `interval_s`; a call only reads what it found, so a silent network never
    blocks a wait. A store that does not answer is no reason to stop, a closed connection is. The client should be
    a connection of its own, because a wait for a key on the same one would delay the questions.
    """

    def __init__(self, store: KeyStore, generation: int, interval_s: float = 0.05) -> None:
        self._store = store
        self._key = _stop_key(generation)
        self._reason: str | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, args=(interval_s,), name="torchdl-stop-flag", daemon=True).start()

    def __call__(self) -> str | None:
        """The reason to stop, or None."""
        return self._reason

    def close(self) -> None:
        """End the questions; the flag keeps what it last found."""
        self._closed.set()

    def _watch(self, interval_s: float) -> None:
        while not self._closed.wait(interval_s):
            try:
                if self._store.check([self._key]):
                    self._reason = self._store.get(self._key).decode()
                    return
            except RuntimeError as error:
                if not self._closed.is_set():
                    self._reason = f"the driver's store is gone, so the driver has ended ({first_line(error)})"
                return


class Watch:
    """Makes the waits of one member of one group; see `Wait`."""

    def __init__(self, group: str, rank: int, timeout_s: float, stop: Stop = never_stop) -> None:
        self.group = group
        self.rank = rank
        self.timeout_s = timeout_s
        self.stop = stop

    def begin(self, what: str) -> Wait:
        """Begin a wait for `what` (a noun phrase for the error)."""
        return Wait(self, what)

    def where(self) -> str:
        """This member, for messages."""
        return f"rank {self.rank} of group {self.group!r}"


class Wait:
    """One wait: call `check` as often as you like; it looks at the stop flag and the deadline every 20 ms."""

    def __init__(self, watch: Watch, what: str) -> None:
        self.what = what
        self._watch = watch
        self._begun_s = time.monotonic()
        self._next_s = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._begun_s

    def check(self, missing: Callable[[], str] | None = None) -> bool:
        """Raise CollectiveError if the wait must end; `missing` tells, for that case, what is not there yet.

        Returns True if it looked, False if the last look was less than 20 ms ago.
        """
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + POLL_S
        reason = self._watch.stop()
        if reason is not None:
            raise self.error(f"stopped: {reason}")
        if now - self._begun_s > self._watch.timeout_s:
            detail = f"; {missing()}" if missing else ""
            raise self.error(
                f"not complete within timeout_s={self._watch.timeout_s:g}{detail}. A peer is stuck, stopped or cut off"
            )
        return True

    def error(self, why: str) -> CollectiveError:
        """The error of this wait, with the reason `why`."""
        return CollectiveError(f"{self.what} failed on {self._watch.where()} after {self.waited_s:.2f} s: {why}")


def exchange(store: KeyStore, watch: Watch, key: str, size: int, value: str) -> list[str]:
    """Give `value` to all ranks and return the values of all, in rank order.

    Costs one message, then one every millisecond until the last rank has come. Raises: CollectiveError at the
    deadline, at a stop, and where the store is closed.
    """
    wait = watch.begin(f"exchange of {key!r} among {size} ranks")
    keys = [f"{key}/{rank}" for rank in range(size)]
    try:
        store.set(keys[watch.rank], value)
        while not store.check(keys):
            wait.check(lambda: f"ranks {[r for r, k in enumerate(keys) if not store.check([k])]} have not come")
            time.sleep(0.001)
        return [store.get(k).decode() for k in keys]
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise wait.error(f"the driver's store was closed or lost ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 200 characters: torch appends whole C++ stacks."""
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _stop_key(generation: int) -> str:
    return f"stop/{generation}"

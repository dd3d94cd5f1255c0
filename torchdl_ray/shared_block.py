"""A block of shared memory among the workers of one node: counters, then a slot for each rank.

Runs on the workers, on Linux on x86_64: the counters are plain stores and rely on its order of stores.

The block is a memory file without a name, which peers open through the creator's /proc entry: nothing can be left in
/dev/shm, whoever is killed when, and the size of /dev/shm is no limit. The memory is taken at once by
`posix_fallocate`, so that a shortage shows as an OSError here and not as SIGBUS at some later write; and it is not
asked for where it would be more than a quarter of what is free, since the kernel might rather end a process than
refuse. Each group has a fresh block, so a stopped peer that wakes late writes into memory that nobody reads.

Invariant: each word of the counters has one writer.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import secrets

SLOT_BYTES = 16 << 20
LINE = 64
WORDS_PER_RANK = 16  # two cache lines, so that neighbours do not share one


def supported() -> bool:
    """True if this machine orders stores as the counters need, and has /proc and memory files."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")


class Block:
    """One block of shared memory: counters, then a slot per rank. `address` lets a process of this node attach."""

    def __init__(self, fd: int, size: int, slot_bytes: int, address: str, created: bool) -> None:
        self.size = size
        self.slot_bytes = slot_bytes
        self.address = address
        self._fd = fd if created else -1
        self.memory = mmap.mmap(fd, _header_bytes(size) + size * slot_bytes)
        self.words = memoryview(self.memory).cast("q")

    @classmethod
    def create(cls, size: int, slot_bytes: int = SLOT_BYTES) -> Block:
        """Make a block for `size` ranks. Raises OSError where the memory cannot be had."""
        wanted, free = _header_bytes(size) + size * slot_bytes, _free_bytes()
        if wanted > free // 4:
            raise OSError(
                errno.ENOMEM, f"{wanted:,} bytes of shared memory wanted, more than a quarter of {free:,} free"
            )
        fd = os.memfd_create("torchdl", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, wanted)
            nonce = secrets.randbits(62)
            block = cls(fd, size, slot_bytes, f"{os.getpid()}:{fd}:{size}:{slot_bytes}:{nonce}", created=True)
        except BaseException:
            os.close(fd)
            raise
        block.words[size * WORDS_PER_RANK] = nonce
        return block

    @classmethod
    def attach(cls, address: str) -> Block:
        """Open the block at `address`. Raises OSError where it cannot be reached from this process."""
        pid, fd, size, slot_bytes, nonce = (int(part) for part in address.split(":"))
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(own).st_size != _header_bytes(size) + size * slot_bytes:
                raise OSError(f"file {fd} of process {pid} is not the block: another process namespace")
            block = cls(own, size, slot_bytes, address, created=False)
        finally:
            os.close(own)
        if block.words[size * WORDS_PER_RANK] != nonce:
            raise OSError(f"file {fd} of process {pid} is another block: another process namespace")
        return block

    def slots(self) -> list[memoryview]:
        """Each rank's slot, as bytes."""
        view, start = memoryview(self.memory), _header_bytes(self.size)
        return [view[start + r * self.slot_bytes : start + (r + 1) * self.slot_bytes] for r in range(self.size)]

    def seal(self) -> None:
        """Close the creator's file: nobody can attach any more. Call it once all have attached."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def release(self) -> None:
        """Unmap the block, unless views of it are still in use; then it goes with the last of them."""
        self.seal()
        self.words.release()
        with contextlib.suppress(BufferError):
            self.memory.close()


def birth(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _free_bytes() -> int:
    """Memory that can be had: what the kernel thinks available, at most the limit of the control group."""
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(limit, encoding="ascii") as file:
            free = min(free, int(file.read()))
    return free


def _header_bytes(size: int) -> int:
    return round_up(size * WORDS_PER_RANK * 8 + 8, mmap.PAGESIZE)


def round_up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step

"""After a failure on a worker: what stands, what is gone, and what is done again. Pure decisions, no waiting.

Runs on the driver. The stream hands in its log, what was sent and what was only recorded, with the ranks' replies;
`decide` returns a `Setback` that the stream then carries out.

Rules: what was recorded before the failing command stands, as in plain PyTorch; the failing command and all later ones
are gone. Workers go back to the last commit, so the local commands between it and the failure are done again. Where
ranks ended up different (torn in a commit, or one commit apart), the whole rank with the highest position is copied to
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .entries import Counts, Entry, Log, Outgoing
from .program import Command, Drop, Failure, Step, ZeroGrad


@dataclass(frozen=True, slots=True)
class Setback:
    """What follows from a failure.

    `stand` and `gone` part the unacknowledged entries at the failing command; `redo` is the log of what stands;
    `zeroed` are the gradients that a dropped zero_grad named, as (model, names), which may be lost; `source` is the
    rank to copy from, or None; `num_steps` counts the optimizer steps among what was sent that are done for good;
    `counts` says where the stream stands then.
    """

    stand: tuple[Entry, ...]
    gone: tuple[Entry, ...]
    redo: Log
    drops: tuple[Entry, ...]
    zeroed: tuple[tuple[int, tuple[str, ...]], ...]
    source: int | None
    num_steps: int
    counts: Counts


def failures(outbox: Sequence[Outgoing]) -> list[tuple[int, int, Failure]]:
    """The failures in the replies as (command, rank, failure): a rank's own before what it learnt of others', then the
    lowest command, then the lowest rank.
    """
    found = [
        (reply.failure.command, rank, reply.failure)
        for outgoing in outbox
        for rank, reply in outgoing.replies.items()
        if reply.failure is not None
    ]
    return sorted(found, key=lambda f: (not f[2].own, f[0], f[1]))


def decide(
    log: Log, outbox: Sequence[Outgoing], waiting: Sequence[Entry], number: int, acknowledged: Counts
) -> Setback:
    """What to do after command `number` failed; every message in `outbox` has the replies of all ranks.

    `acknowledged` is where the stream stands after the last message that all ranks did.
    """
    sent = [e for o in outbox for e in o.entries]
    recent = [*sent, *waiting]
    stand = [e for e in recent if e.command.id < number]
    gone = [e for e in recent if e.command.id >= number]
    redo = log.after(stand)
    counts = stand[-1].counts if stand else acknowledged
    replies = list(outbox[-1].replies.values())
    torn = [r for r in replies if r.failure is not None and r.failure.torn]
    whole = [r for r in replies if r not in torn] or replies
    best = max(whole, key=lambda r: (r.position, -r.rank))
    num_steps = sum(isinstance(e.command, Step) for e in sent if e.command.id < number)
    failed = next((e for e in gone if e.command.id == number), None)
    if failed is not None and best.position > min(r.position for r in replies):
        counts = failed.counts  # the commit that failed on one rank is done on the source
        num_steps += isinstance(failed.command, Step)
        redo = log.after([*stand, failed])
    return Setback(
        stand=tuple(stand),
        gone=tuple(gone),
        redo=redo,
        drops=tuple(e for e in gone if isinstance(e.command, Drop)),
        zeroed=tuple((e.command.model, e.command.names) for e in gone if isinstance(e.command, ZeroGrad)),
        source=best.rank if torn or any(r.position != best.position for r in replies) else None,
        num_steps=num_steps,
        counts=counts,
    )


def describe(commands: Sequence[Command]) -> str:
    """Commands in words: `Forward, Backward, Step and 3 more`."""
    names = [type(c).__name__ for c in commands if not isinstance(c, Drop)]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")

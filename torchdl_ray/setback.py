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

from .entries import Entry, Outgoing
from .program import Command, Drop, Failure, Forward, Kind, Step, ZeroGrad


@dataclass(frozen=True, slots=True)
class Setback:
    """What follows from a failure.

    `stand` and `gone` part all entries at the failing command; `redo` are those of `stand` to be done again; `zeroed`
    are the gradients that a dropped zero_grad named, as (model, names), which may be lost; `source` is the rank to
    copy from, or None; `num_steps` counts the optimizer steps among what was sent that are done for good.
    """

    stand: tuple[Entry, ...]
    gone: tuple[Entry, ...]
    redo: tuple[Entry, ...]
    drops: tuple[Entry, ...]
    zeroed: tuple[tuple[int, tuple[str, ...]], ...]
    source: int | None
    num_steps: int


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


def decide(log: Sequence[Entry], outbox: Sequence[Outgoing], waiting: Sequence[Entry], number: int) -> Setback:
    """What to do after command `number` failed; every message in `outbox` has the replies of all ranks."""
    entries = [*log, *(e for o in outbox for e in o.entries), *waiting]
    stand = [e for e in entries if e.command.id < number]
    gone = [e for e in entries if e.command.id >= number]
    last_commit = max((i for i, e in enumerate(stand) if e.command.kind is Kind.COMMIT), default=-1)
    replies = list(outbox[-1].replies.values())
    torn = [r for r in replies if r.failure is not None and r.failure.torn]
    whole = [r for r in replies if r not in torn] or replies
    best = max(whole, key=lambda r: (r.position, -r.rank))
    differs = bool(torn) or any(r.position != best.position for r in replies)
    sent = [e for o in outbox for e in o.entries]
    num_steps = sum(isinstance(e.command, Step) and e.command.id < number for e in sent)
    if differs and best.position > min(r.position for r in replies) and gone and isinstance(gone[0].command, Step):
        num_steps += 1  # the step that failed on one rank is done on the source
    return Setback(
        stand=tuple(stand),
        gone=tuple(gone),
        redo=tuple(e for e in stand[last_commit + 1 :] if e.is_local),
        drops=tuple(e for e in gone if isinstance(e.command, Drop)),
        zeroed=tuple((e.command.model, e.command.names) for e in gone if isinstance(e.command, ZeroGrad)),
        source=best.rank if differs else None,
        num_steps=num_steps,
    )


def describe(commands: Sequence[Command]) -> str:
    """Commands in words: `Forward, Backward, Step and 3 more`."""
    names = [type(c).__name__ for c in commands if not isinstance(c, Drop)]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def forwards(entries: Sequence[Entry]) -> list[Forward]:
    """The forwards among entries."""
    return [e.command for e in entries if isinstance(e.command, Forward)]

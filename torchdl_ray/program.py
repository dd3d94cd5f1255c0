"""The vocabulary of driver and workers: frozen commands, messages and replies.

Runs on both sides; it is the only thing that they share. The driver records commands, gathers them into one `Message`
per worker, and sends that with the rank's own data (its payload). A worker executes the commands in order and answers
each message with one `Reply`.

What crosses: one `Message` and the payload of one rank per training step; a `Reply` of under 1 KB back.

Invariant: commands carry absolute values, never differences, and are of three kinds, so that a worker can say by one
number, its `position`, what it has done:

* PURE commands change nothing and may be asked again.
* LOCAL commands change one replica's gradients and buffers until the next commit; a worker can undo them.
* COMMIT commands change all replicas alike; each adds one to `position`, whether or not it changed a value.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar

from .payload import Autocast as Autocast
from .payload import CallResult as CallResult
from .payload import Cut as Cut
from .payload import Gradient as Gradient
from .payload import LeafKind as LeafKind
from .payload import Link as Link
from .payload import Number as Number
from .payload import RandomKey as RandomKey
from .payload import Remote as Remote
from .payload import Same as Same
from .payload import Seed as Seed
from .payload import ShardData as ShardData
from .payload import Structure as Structure
from .payload import Value as Value
from .payload import WireTensor as WireTensor


class Kind(Enum):
    """What a command does to a replica's state (see the module's docstring)."""

    PURE = "pure"
    LOCAL = "local"
    COMMIT = "commit"


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


@functools.cache
def _values(kind: Any) -> Callable[[Command], tuple[Any, ...]]:
    return operator.attrgetter(*_names(kind))


def _command(kind: Any, values: tuple[Any, ...]) -> Command:
    made: Command = kind(**dict(zip(_names(kind), values, strict=True)))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`id` rises over a stream; `site` is the user's line that recorded it, as `file:line in function`."""

    kind: ClassVar[Kind] = Kind.PURE
    id: int
    site: str = ""

    def __reduce__(self) -> tuple[Any, ...]:  # a dataclass's own way takes several times as long
        kind: Any = type(self)
        return _command, (kind, _values(kind)(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Command):
    """Run `method` of the module on this rank's shard and keep outputs and graph under `call`.

    `template` is a pickle of the leaves of (args, kwargs), with `Cut`, `Same` or `Remote` in place of tensors, and
    their spec (see `tree.flatten`); `differentiable` are the positions of leaves whose gradient may be asked for.
    Replies with a `CallResult`. Payload: the rank's `ShardData`, then the common arrays.
    """

    model: int
    call: int
    method: str
    template: bytes
    differentiable: tuple[int, ...]
    grad: bool
    inference: bool
    training: bool
    autocast: Autocast | None
    key: RandomKey
    dim: int
    reduction: Any
    out_dims: Any
    expected: Structure | None

    @property
    def is_local(self) -> bool:
        """True if the call can change gradients or buffers; otherwise it is as good as pure."""
        return self.grad or self.training


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Command):
    """Run backward from `seeds` through call `call`.

    `full` False leaves parameters alone (`torch.autograd.grad` for inputs). `inputs` are the differentiable inputs
    whose gradients the driver wants back (reply: their rows), `links` those that stay here for an earlier call.
    """

    kind = Kind.LOCAL
    model: int
    call: int
    seeds: tuple[Seed, ...]
    keep_graph: bool
    full: bool
    inputs: tuple[int, ...] = ()
    links: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Command):
    """Forget calls, and values or optimizers by their number: nothing on the driver refers to them any more."""

    calls: tuple[int, ...] = ()
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGrad(Command):
    """Set the named gradients to None, or to zeros where `to_none` is False and they are not None."""

    kind = Kind.LOCAL
    model: int
    names: tuple[str, ...]
    to_none: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AddGrad(Command):
    """Add gradients that the driver computed itself (a penalty on the weights). Payload: WireTensors in order."""

    kind = Kind.LOCAL
    model: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(Command):
    """Sum the local gradients over all ranks and level the buffers. Replies with the names whose grad is not None."""

    kind = Kind.COMMIT
    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipGradNorm(Command):
    """Scale the reduced gradients of `names` to a total norm of at most `max_norm`. Replies with the norm before."""

    kind = Kind.COMMIT
    model: int
    names: tuple[str, ...]
    max_norm: float
    norm_type: float
    error_if_nonfinite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply(Command):
    """Run torch functions on values that are equal on all replicas.

    `body` is a pickle of (operations, kept), see operations.py, in which `Value` and `Gradient` stand for tensors; the
    results number `kept` are kept under the numbers `outputs`. Gradients may be changed in place.
    """

    kind = Kind.COMMIT
    body: bytes
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Write(Command):
    """Overwrite named parameters or buffers on all replicas. Payload: WireTensors in the order of `names`."""

    kind = Kind.COMMIT
    model: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteGrad(Command):
    """Overwrite named reduced gradients on all replicas. Payload: WireTensors in the order of `names`."""

    kind = Kind.COMMIT
    model: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure(Command):
    """Set module modes, plain attributes and requires_grad: `modes` by module name, `attributes` a pickle of
    {(module name, attribute): value}, `requires_grad` by parameter name. Only what differs from the last one sent.
    """

    kind = Kind.COMMIT
    model: int
    modes: tuple[tuple[str, bool], ...] = ()
    attributes: bytes = b""
    requires_grad: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt(Command):
    """Build the optimizer `optimizer` from `body` (see adoption.py), replacing one of the same number.

    `body` and its tensors come as payload: (bytes, WireTensors).
    """

    kind = Kind.COMMIT
    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Command):
    """Step the optimizer. Like every commit it first reduces the gradients and buffers that are pending.

    `groups` is a pickle of the hyperparameters and memberships of the groups that changed since the last one sent
    (b"" where none did), in absolute values. `key` seeds optimizers that draw random numbers.
    """

    kind = Kind.COMMIT
    optimizer: int
    groups: bytes
    key: RandomKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Command):
    """Run `body`, a pickle of (function, args, kwargs), as function(module, *args) and count it as a commit."""

    kind = Kind.COMMIT
    model: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AddModel(Command):
    """Build a further model `model` on the workers. Payload: its shipped body.

    `seed` is for the values of a module from the meta device; `compiled` says that it is compiled there.
    """

    kind = Kind.COMMIT
    model: int
    seed: int = 0
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DropModel(Command):
    """Forget a model: it was closed, but others live on the same workers."""

    kind = Kind.COMMIT
    model: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Command):
    """Take over rank `source`'s whole state: models, optimizers, gradients, position. Only the first in a resumed
    generation, when a failure left replicas different.
    """

    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo(Command):
    """Go back to the last commit: what forwards before it did to buffers is void, their graphs stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(Command):
    """Reply with the values of output `leaf` of `call` on this rank: a WireTensor, or any other object."""

    call: int
    leaf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe(Command):
    """Reply with the shape of every output leaf of `call` on this rank (None for other objects)."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTensors(Command):
    """Rank 0 replies with the named parameters and buffers as WireTensors, the others with None."""

    model: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadGrads(Command):
    """Rank 0 replies with the named reduced gradients as WireTensors (None where None), the others with None."""

    model: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadValue(Command):
    """Rank 0 replies with the value `value` as a WireTensor, the others with None."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptimizer(Command):
    """Rank 0 replies with what its steps changed (see `adoption.ship_state`), the others with None. `state` False
    leaves the tensors of the state out.
    """

    optimizer: int
    state: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Command):
    """Run `body`, a pickle of (function, args, kwargs), as function(module, *args) on `ranks` (None: all)."""

    model: int
    body: bytes
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hash(Command):
    """Reply with {tensor name: hash} over parameters, buffers, optimizer state and reduced gradients."""

    model: int


@dataclass(frozen=True, slots=True)
class Message:
    """One program for one rank. Numbers rise by one within a generation, starting at 1; doubles are ignored.

    A message with `resume` set is the first of a new generation: the worker undoes its local commands and forgets its
    failure.
    """

    generation: int
    number: int
    commands: tuple[Command, ...]
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The first thing that went wrong on a rank: at which command, the exception as bytes (see remote_exception.py).

    `own` is False where this rank only learnt of another rank's failure.
    """

    command: int
    site: str
    own: bool
    exception: bytes
    text: str
    torn: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """A rank's answer to one message: results by command id, its position, and its failure if it has one."""

    rank: int
    generation: int
    number: int
    position: int
    results: tuple[tuple[int, Any], ...] = ()
    failure: Failure | None = None
    busy_s: float = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        told = (self.rank, self.generation, self.number, self.position, self.results, self.failure, self.busy_s)
        return Reply, told

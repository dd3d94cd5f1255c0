"""Everything that torchdl_ray raises, in one tree.

Runs on the driver and on the workers; every class pickles, because failures cross between processes.

    TorchdlError
    ├── ArgumentError (ValueError)            a wrong argument, found before anything is sent
    │   └── ScatterError                      inputs that cannot be cut into shards
    ├── GatherError (ValueError)              outputs that cannot be joined into one value
    ├── UnsupportedError (NotImplementedError) a torch call that cannot work here; names what does
    ├── BackwardError (RuntimeError)          backward through a call whose graph is gone
    ├── StructureChanged (RuntimeError)       a call returned another structure than before
    ├── ClosedError (RuntimeError)            use after close()
    ├── OutOfSync (RuntimeError)              replicas differ; names ranks and parameters
    ├── PlacementError (RuntimeError)         devices that the cluster can never give
    │   └── PlacementTimeout (TimeoutError)   devices that were not free in time
    ├── WaitTimeout (TimeoutError)            a wait passed its deadline; says what it waited for
    ├── CollectiveError (RuntimeError)        a reduction failed: a peer is gone, or the group was stopped
    ├── WorkerLost (RuntimeError)             a worker process died
    ├── StaleMessage (RuntimeError)           a message of an older generation, or a gap in their numbers
    └── RemoteError (RuntimeError)            a user's exception that cannot be rebuilt on the driver

A user's own exception is raised as its own type; `RemoteTraceback` is its cause and carries the worker's traceback.
"""


class TorchdlError(Exception):
    """The root: catch it to catch everything that this package raises itself."""


class ArgumentError(TorchdlError, ValueError):
    """An argument is wrong. Raised on the driver before anything is sent."""


class ScatterError(ArgumentError):
    """The inputs of a call cannot be cut into shards; names the argument and the sizes."""


class GatherError(TorchdlError, ValueError):
    """The replicas' outputs cannot be joined into one value; `.shards` and `out_dims` are the ways out."""


class UnsupportedError(TorchdlError, NotImplementedError):
    """A stock torch call that cannot do its work on remote values; the message names what does."""


class BackwardError(TorchdlError, RuntimeError):
    """Backward through a call whose graph was freed, or that never had one."""


class StructureChanged(TorchdlError, RuntimeError):
    """A call returned another structure than it did before; `dynamic_output=True` allows that."""


class ClosedError(TorchdlError, RuntimeError):
    """The model was closed: its workers are gone."""


class OutOfSync(TorchdlError, RuntimeError):
    """Replicas hold different states; names the ranks and the tensors that differ."""


class PlacementError(TorchdlError, RuntimeError):
    """The cluster cannot give the devices: what was asked for, what exists, and who holds it."""


class PlacementTimeout(PlacementError, TimeoutError):
    """The devices were not free within the time limit."""


class WaitTimeout(TorchdlError, TimeoutError):
    """A wait passed its deadline. The message says what it waited for."""


class CollectiveError(TorchdlError, RuntimeError):
    """A reduction among workers failed: a peer is gone, it timed out, or the group was stopped."""


class WorkerLost(TorchdlError, RuntimeError):
    """A worker process died; names the rank, the node and the step."""


class StaleMessage(TorchdlError, RuntimeError):
    """A message of an older generation, or a gap in the numbers of messages."""


class RemoteError(TorchdlError, RuntimeError):
    """Stands for a user's exception of which only the text could cross from the worker.

    `type_name` is the original class, `__cause__` carries the remote traceback.
    """

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message, type_name)
        self.type_name = type_name

    def __str__(self) -> str:
        return f"{self.type_name}: {self.args[0]}" if self.type_name else str(self.args[0])


class RemoteTraceback(Exception):
    """The cause of a user's exception raised on the driver: the traceback as the worker saw it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text

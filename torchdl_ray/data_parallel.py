"""`DataParallel`: the class the user holds; thin verbs over the stream, the caller, the parameters and the group.

Runs on the driver. What each verb costs in messages stands in its docstring; a training step costs one message per
worker and brings under 1 KB back.

Invariant: after `close()`, also by an exception, no worker, reservation or port is left, and the user's module is an
ordinary module again with the newest values.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from ray import cloudpickle
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from . import optim, program, view
from .caller import Caller, Options, Reduction
from .errors import ArgumentError, BackwardError, OutOfSync, UnsupportedError
from .layout import Layout
from .norm import Norm
from .remote_parameter import Parameters, claim
from .remote_tensor import RemoteTensor
from .shipping import ship
from .stream import Stream
from .workforce import Wanted, add_model, check_device, check_module, check_options, check_workers, leave, open_stream
from .wrapped_module import WrappedModule

logger = logging.getLogger("torchdl_ray")

START_TIMEOUT_S = 300.0


class DataParallel(WrappedModule):
    """Trains a module on every device of a Ray cluster, with the loop in this process.

    Wrapping sends the module to the workers (one message each, and the weights once) and waits until they hold it. The
    module's parameters stay usable here: reading one brings its newest value, optimizers over them step on the workers.

    Args:
        module: any nn.Module, on any device. One on the meta device is initialised on the workers, by its modules'
            `reset_parameters` and `seed`; one from torch.compile is compiled on the workers.
        num_workers: how many workers, one device each. None: all GPUs of the cluster, or its CPUs where it has none.
            0: the module runs in this process, without Ray.
        dim: the dimension of the inputs' rows, along which batches are cut and outputs joined.
        use_gpu: None: GPUs if the cluster has any.
        resources_per_worker: Ray resources, {"CPU": 4, "GPU": 1}; fractions let models share a device.
        reduction: how 0-dim outputs are read: "mean" (weighted by rows or by `loss_weight`), "sum", or a mapping by
            output name, {"count": "sum"}; a 0-dim integer has to be told.
        loss_weight: `fn(*args, **kwargs)` -> one weight per row of the batch (token counts, say), called on the driver.
        microbatch_size: the most rows in one forward on a worker; the split is exact.
        out_dims: the dimension of the rows of each output where it is not `dim`: an int, or a mapping by output name.
        output_device: where fetched outputs come to.
        backend: "auto", "nccl", "gloo", "shared_memory", a backend of Ray's own registry ("NCCL", "GLOO"), or "local":
            `num_workers` workers in this process, for debugging.
        seed: of all random numbers that the module draws on the workers.
        sync: wait at every verb, so that errors show at their own line.
        name: what Ray's tools show.
        dynamic_output: expect another output structure at each call, at the price of a wait per call.
        workers: another DataParallel, on whose workers this model lives too; it brings no devices of its own.
        timeout_s: how long to wait for an answer before WaitTimeout; also the limit of every collective.
        placement_timeout_s: how long to wait for devices.
        runtime_env: Ray's, for the workers.

    Raises:
        ArgumentError, UnsupportedError: before anything is sent.
        PlacementError: the devices cannot be had; nothing is left behind.
    """

    _core: nn.Module
    _stream: Stream
    _model: int
    _caller: Caller
    _parameters_hub: Parameters
    _finalizer: weakref.finalize[..., DataParallel]
    _name: str

    def __init__(
        self,
        module: nn.Module,
        num_workers: int | None = None,
        *,
        dim: int = 0,
        use_gpu: bool | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        reduction: Reduction = "mean",
        loss_weight: Callable[..., Any] | None = None,
        microbatch_size: int | None = None,
        out_dims: int | Mapping[Any, int] | None = None,
        output_device: str | torch.device = "cpu",
        backend: str = "auto",
        seed: int = 0,
        sync: bool = False,
        name: str | None = None,
        dynamic_output: bool = False,
        workers: DataParallel | None = None,
        timeout_s: float = 600.0,
        placement_timeout_s: float = START_TIMEOUT_S,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_module(module)
        check_options(dim, reduction, microbatch_size, loss_weight, timeout_s, out_dims, seed)
        device = check_device(output_device)
        check_workers(workers)
        options = Options(dim, reduction, out_dims, loss_weight, microbatch_size, device, seed, dynamic_output)
        compiled = isinstance(module, OptimizedModule)
        core: nn.Module = module._orig_mod if isinstance(module, OptimizedModule) else module
        claim(core)
        shipment = ship(core)
        wanted = Wanted(
            num_workers, use_gpu, resources_per_worker, backend, name, timeout_s, placement_timeout_s, runtime_env
        )
        stream = open_stream(wanted, workers._stream if workers is not None else None, sync)
        try:
            model = add_model(stream, shipment, seed, compiled)
            hub = Parameters(core, stream, model, seed)
            caller = Caller(stream, model, core, hub, Layout(stream.group.size), options)
        except BaseException:
            leave(stream, None)
            raise
        finalizer = weakref.finalize(self, _let_go, stream, hub)
        finalizer.atexit = False
        atexit.register(finalizer)  # last in, first out: before Ray, which was started earlier, ends the workers
        self.__dict__.update(  # plain attributes: as a submodule the module's parameters would get a prefix
            _core=core,
            _stream=stream,
            _model=model,
            _caller=caller,
            _parameters_hub=hub,
            _finalizer=finalizer,
            _name=name or type(core).__name__,
        )
        self.training = core.training

    # ---- the training loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the batch, cut along `dim` over the workers.

        Args: any nesting of tensors, arrays, lists with one entry per row, and other objects; `replicate(x)` marks what
            every worker gets whole.
        Returns: the module's output with RemoteTensors `[rows, ...]` in place of its tensors. Costs no message by
            itself; the first three calls of a kind wait for the output's structure.
        Raises: ScatterError before anything is sent; UnsupportedError for what was added to the wrapper itself.
        """
        for what in ("_parameters", "_buffers", "_modules", "_backward_hooks", "_backward_pre_hooks"):
            if getattr(self, what):
                raise UnsupportedError(
                    f"the wrapper has {what.strip('_')} of its own, which the workers lack; give them to the module "
                    "before it is wrapped"
                )
        return self._caller.call("forward", args, kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As `forward`, for another method of the module: `model.call("encode", x)`. As exact, and differentiable."""
        if not callable(getattr(type(self._core), method, None)):
            raise ArgumentError(f"{type(self._core).__name__} has no method {method!r}")
        return self._caller.call(method, args, kwargs)

    def backward(self, scale: float = 1.0) -> None:
        """Backward from the loss that the last call returned: its one 0-dim float output, times `scale`.

        Equal to `(loss * scale).backward()`. Costs no message by itself.
        Raises: BackwardError where the last call returned no such output, or several.
        """
        losses = self._caller.losses
        if losses is None or len(losses) != 1:
            found = (
                "no call was made" if losses is None else f"the last call returned {len(losses)} scalars with a graph"
            )
            raise BackwardError(
                f"model.backward() needs one loss, but {found}. Return one scalar loss from the module, or call "
                "(...).backward() on the loss itself"
            )
        self._caller.losses = None
        (losses[0] if scale == 1.0 else losses[0] * scale).backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. Costs no message by itself."""
        self._parameters_hub.zero_grad(set_to_none=set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale the global gradient to a total norm of at most `max_norm`; the workers do it, nothing moves.

        Returns: the norm before, a 0-dim float that waits only when it is looked at.
        """
        hub = self._parameters_hub
        names = tuple(hub.parameters)
        if parameters is not None:
            wanted = {id(p) for p in parameters}
            names = tuple(n for n, p in hub.parameters.items() if id(p) in wanted)
        hub.before_backward()
        pending = self._stream.record(
            program.ClipGradNorm,
            model=self._model,
            names=names,
            max_norm=float(max_norm),
            norm_type=float(norm_type),
            error_if_nonfinite=error_if_nonfinite,
        )
        hub.after_backward()
        return RemoteTensor.of(Norm(pending), 0, None, torch.device("cpu"))

    # ---- the workers

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(module, *args, **kwargs)` on every worker and return its results by rank, tensors on the CPU.

        For looking (weights, activations, memory), not for changing: use `change` for that. One message per worker, and
        waits.
        """
        return self._run(fn, args, kwargs, None)

    def _run(self, fn: Callable[..., Any], args: Any, kwargs: Any, ranks: tuple[int, ...] | None) -> list[Any]:
        self._parameters_hub.before_call()
        body = cloudpickle.dumps((fn, args, kwargs))
        return self._stream.record(program.Run, model=self._model, body=body, ranks=ranks).wait("model.run")

    def change(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(module, *args, **kwargs)` on every worker to change parameters or buffers, alike on all. A commit:
        done once on each replica. One message per worker, and waits.
        """
        self._parameters_hub.before_call()
        body = cloudpickle.dumps((fn, args, kwargs))
        pending = self._stream.record(program.Change, model=self._model, body=body)
        self._parameters_hub.after_commit()
        return pending.wait("model.change")

    @property
    def replicas(self) -> tuple[view.Replica, ...]:
        """The replicas; `model.replicas[r].run(fn)` calls a function on one."""
        group = self._stream.group
        return tuple(view.Replica(m, d, self._run) for m, d in zip(group.members, group.devices, strict=True))

    def check_sync(self) -> tuple[str, ...]:
        """Compare all replicas' parameters, buffers, optimizer state and reduced gradients, bit by bit.

        Returns: one hash per replica, all equal. Raises: OutOfSync, naming ranks and tensors. One message per worker.
        """
        self._parameters_hub.before_call()
        self._stream.level(self._model)
        found = self._stream.record(program.Hash, model=self._model).wait("the replicas' hashes")
        odd = view.differing(found)
        if odd:
            raise OutOfSync("the replicas differ. " + "; ".join(f"{n} on ranks {list(r)}" for n, r in odd.items()))
        return tuple(view.digest(hashes) for hashes in found)

    def flush(self) -> None:
        """Send what was recorded; does not wait. Raises what earlier commands raised."""
        self._parameters_hub.before_call()
        self._stream.flush()

    @property
    def version(self) -> int:
        """The number of optimizer steps recorded, by all models on the same workers."""
        return self._stream.version

    def close(self) -> None:
        """Finish what was recorded, bring the newest values home, and let the workers go. Idempotent."""
        if self._finalizer.detach() is not None:
            atexit.unregister(self._finalizer)
            _shut_down(self._stream, self._parameters_hub)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a DataParallel holds workers and cannot be copied or pickled; copy.deepcopy(model.module) and "
            "torch.save(model.state_dict(), path) work; model.run(fn) passes the module to fn"
        )

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return view.text(self._name, self._stream, self._finalizer.alive)

    def _repr_html_(self) -> str:
        return view.html(self._name, self._stream, self._finalizer.alive)


def _let_go(stream: Stream, hub: Parameters) -> None:
    """What garbage collection and the end of the process do: as `close`, but a failure is only told."""
    try:
        _shut_down(stream, hub)
    except Exception as error:
        logger.warning("while closing a model: %s: %s", type(error).__name__, error)


def _shut_down(stream: Stream, hub: Parameters) -> None:
    """Bring the newest values home, wait for what was recorded, and let the workers go if nobody else is there."""
    try:
        optim.release_optimizers(hub)
        hub.release()
    finally:
        leave(stream, hub.model)


optim.install()

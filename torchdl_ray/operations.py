"""Torch functions on remote values: which of them look at values at all, how they are named, and how they are run.

Runs on both sides: the driver asks what a function is and names it (`name_of`), a worker runs a list of `Operation`s
(`run`). What crosses: pickled operations, in which `program.Value`, `program.Gradient` and `Local` stand for tensors.

Invariant: all replicas get the same bits. A number that comes out of a sum may differ in its last bit between machines
with different threads, so it is taken from rank 0 before it changes anything that is equal on all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .program import Gradient, Value

Function = Callable[..., Any]


class Local(int):
    """Stands for a result of an earlier operation of the same list, by its number."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a torch function; tensors in the arguments are marks or constants."""

    function: tuple[str, str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# ---- what a function does

_VALUE_PROPERTIES = frozenset(("H", "T", "_grad", "data", "grad", "imag", "mH", "mT", "real"))
_METADATA_METHODS = (
    "__hash__ __len__ dim dim_order element_size get_device has_names is_complex is_conj is_contiguous "
    "is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed nelement "
    "ndimension numel requires_grad_ retain_grad size storage_offset stride _is_view data_ptr is_distributed "
    "resolve_conj_ __dir__"
)
_METADATA_FUNCTIONS = (
    "is_floating_point is_complex is_conj is_neg is_inference is_same_size is_signed numel get_device result_type "
    "is_distributed is_tensor"
)
_SHAPE_ONLY = "empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
_NEW = "new_empty new_zeros new_ones new_full new_tensor new_empty_strided new"


def _metadata() -> Iterator[Any]:
    base = torch._C.TensorBase
    for name in dir(base):
        property_ = getattr(base, name)
        if isinstance(property_, GetSetDescriptorType) and name not in _VALUE_PROPERTIES:
            yield property_.__get__
            yield property_.__set__
    for names, holder in ((_METADATA_METHODS, Tensor), (_METADATA_FUNCTIONS, torch)):
        yield from (getattr(holder, name) for name in names.split() if hasattr(holder, name))


def _named(names: str, *holders: Any) -> frozenset[Any]:
    return frozenset(getattr(h, n) for n in names.split() for h in holders if hasattr(h, n))


METADATA: frozenset[Any] = frozenset(_metadata())  # never look at values
SHAPE_ONLY = _named(_SHAPE_ONLY, torch) | _named(_NEW, Tensor)  # make tensors of the same shape
_LOOKS = (
    "__repr__ __format__ __str__ __array__ __reduce_ex__ __reduce__ __deepcopy__ __setstate__ __float__ __int__ "
    "__bool__ __index__ __complex__ __contains__ item tolist numpy storage untyped_storage _typed_storage __dlpack__ "
    "__dlpack_device__ is_nonzero equal allclose share_memory_ pin_memory to_mkldnn to_sparse"
)
LOOKS = frozenset(_LOOKS.split())  # by name: need the values on the driver
_RANDOM = re.compile(
    r"rand|normal|uniform|bernoulli|dropout|multinomial|poisson|exponential|geometric_|cauchy|random_|rrelu|binomial"
)
_ORDER_MATTERS = re.compile(r"mm|matmul|mv|dot|einsum|linear$|conv|cum|softmax|norm|svd|qr|eig|inv|solve|lstsq|var|std")


def is_random(function: Function) -> bool:
    """Whether it draws random numbers, which each worker would draw differently."""
    return _RANDOM.search(getattr(function, "__name__", "")) is not None


# ---- names

_HOLDERS: dict[str, Any] = {
    "Tensor": Tensor,
    "torch": torch,
    "variable": torch._C._VariableFunctions,
    "functional": torch.nn.functional,
    "nn": torch._C._nn,
    "linalg": torch.linalg,
    "special": torch.special,
    "fft": torch.fft,
}


@functools.cache
def name_of(function: Function) -> tuple[str, str] | None:
    """Where the other side finds the function, None if it is not torch's own."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if isinstance(owner, GetSetDescriptorType):
        return (name, owner.__name__) if name in ("__get__", "__set__") else None
    short = name.partition("_")[2]  # linalg_vector_norm
    spellings = [(key, n) for key in _HOLDERS for n in (name, short, f"__{name}__") if n]
    return next((at for at in spellings if getattr(_HOLDERS[at[0]], at[1], None) == function), None)


@functools.cache
def named(name: tuple[str, str]) -> Function:
    """The inverse of `name_of`."""
    holder, member = name
    if holder in ("__get__", "__set__"):
        found: Function = getattr(getattr(Tensor, member), holder)
    else:
        found = getattr(_HOLDERS[holder], member)
    return found


# ---- arguments


def replaced(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The arguments of a torch function with every leaf changed; only plain lists, tuples and dicts are entered."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([replaced(item, change) for item in tree])
    if kind is dict:
        return {key: replaced(item, change) for key, item in tree.items()}
    if kind is slice:
        return slice(change(tree.start), change(tree.stop), change(tree.step))
    return change(tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors among the arguments of a torch function, in order."""
    found: list[Tensor] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    replaced(tree, note)
    return found


# ---- running

Find = Callable[[Value | Gradient], Tensor | None]
Share = Callable[[Sequence[Tensor]], None]


def run(
    operations: Sequence[Operation], kept: Sequence[int], find: Find, share: Share, device: torch.device
) -> list[Any]:
    """Run operations in order, without recording gradients.

    Args:
        operations: what to do.
        kept: the numbers of the results to return.
        find: the tensor of a mark.
        share: overwrite tensors by those of rank 0.
        device: where constants go that are no single numbers.
    """
    results: list[Any] = []
    doubtful: dict[int, Tensor] = {}  # by identity: may differ between replicas in the last bit

    def settle(tensors: Sequence[Any]) -> None:
        open_ones = {id(t): t for t in tensors if id(t) in doubtful}
        if open_ones:
            share(list(open_ones.values()))
            for key in open_ones:
                del doubtful[key]

    def resolve(leaf: Any) -> Any:
        if isinstance(leaf, Local):
            return results[leaf]
        if isinstance(leaf, Value | Gradient):
            return find(leaf)
        return leaf.to(device) if isinstance(leaf, Tensor) and leaf.ndim and not leaf.is_meta else leaf

    with torch.no_grad():
        for operation in operations:
            args, kwargs = replaced((operation.args, operation.kwargs), resolve)
            inputs = tensors_in((args, kwargs))
            if any(id(t) not in doubtful and t.ndim for t in inputs):
                settle(inputs)
            outputs = pytree.tree_leaves(named(operation.function)(*args, **kwargs))
            results += outputs
            if any(id(t) in doubtful for t in inputs):
                doubtful |= {id(t): t for t in outputs if isinstance(t, Tensor)}
            else:
                doubtful |= {id(t): t for t in outputs if isinstance(t, Tensor) and _may_differ(operation, t, inputs)}
        settle([results[k] for k in kept])
    return [results[k] for k in kept]


def _may_differ(operation: Operation, output: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether a result depends on the order of additions: it is smaller than what it was made from, and no view."""
    if not inputs or any(t is output for t in inputs):
        return False
    smaller = output.numel() < max(t.numel() for t in inputs)
    if not smaller and not _ORDER_MATTERS.search(operation.function[1]):
        return False
    storage = output.untyped_storage()._cdata
    return all(t.is_meta or t.untyped_storage()._cdata != storage for t in inputs)

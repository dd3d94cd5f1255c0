"""A user's exception on its way from a worker to the driver, as its own type where that is possible.

Runs on both sides: `pack` on the worker that failed, `unpack` on the driver. What crosses: once per failure, some bytes
(a plain pickle of strings around a cloudpickle of the exception) and the text of the traceback.

Notable choices: an exception is first pickled as Python would do it; where that fails or changes its text (constructors
with arguments of their own, locks or files among its attributes), it is rebuilt without calling its constructor, from
its class, `args` and whatever attributes can be pickled. The worker rebuilds it once itself, so that what leaves it is
known to arrive, and only what cannot be rebuilt arrives as `RemoteError`. Classes of a notebook cell come back as the
driver's own class, because cloudpickle tracks them.

Invariant: `unpack` always returns an exception whose `__cause__` is the worker's traceback; it never raises itself.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from ray import cloudpickle

from .errors import RemoteError, RemoteTraceback

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Packed(NamedTuple):
    """An exception as it travels: `exception` for `unpack`, `text` is the worker's traceback, readable as it is."""

    exception: bytes
    text: str


def pack(
    exception: BaseException, *, rank: int, node: str, step: int | None = None, site: str = "", called: str = ""
) -> Packed:
    """Turn an exception into bytes and text, on the worker that raised it.

    Args:
        exception: what was caught; interrupts and exits become `RemoteError` on the driver.
        rank: the worker's rank.
        node: the worker's node, as the user knows it (an address).
        step: the step in which it happened, if there is one.
        site: the driver's line that asked for the work, `file:line in function`, if known.
        called: what was called, where that says more than the step.
    """
    text = traceback_text(exception)
    where = f"raised on worker {rank} (node {node})"
    where += f" at step {step}" if step is not None else ""
    where += f" in {called}" if called else ""
    where += f", called from {site}" if site else ""
    body = _body(exception) if isinstance(exception, Exception) else b""
    envelope = (body, _text_of(exception), _type_name(exception), where)
    return Packed(pickle.dumps(envelope), text)


def unpack(exception: bytes, text: str) -> BaseException:
    """Rebuild what `pack` made: its own type, the worker's traceback as `__cause__`, and a note that says where.

    Args:
        exception: `Packed.exception`.
        text: `Packed.text`.
    """
    body, message, type_name, where = pickle.loads(exception)
    error: BaseException
    try:
        error = _load(body) if body else RemoteError(message, type_name)
        if not isinstance(error, Exception):
            error = RemoteError(message, type_name)
    except Exception:  # the class may not exist here, or its constructor may want a device that is only there
        error = RemoteError(message, type_name)
    # Past the class's own __setattr__, which a frozen dataclass closes.
    BaseException.__setattr__(error, "__cause__", RemoteTraceback(text))
    notes = [*getattr(error, "__notes__", ()), where]
    BaseException.__setattr__(error, "__notes__", notes)
    return error


def traceback_text(exception: BaseException) -> str:
    """The traceback with its chain of causes, as text, without this package's own frames at its top."""
    try:
        summary = traceback.TracebackException.from_exception(exception)
        own = 0
        for frame in summary.stack:
            if not frame.filename.startswith(_PACKAGE):
                break
            own += 1
        if own < len(summary.stack):
            del summary.stack[:own]
        return "".join(summary.format()).rstrip("\n")
    except Exception as failure:  # an exception can be broken enough to break its own printing
        return f"{_type_name(exception)}: (its traceback cannot be printed: {_text_of(failure)})"


def _body(exception: Exception) -> bytes:
    """Bytes from which `_load` rebuilds the exception, tried here; b"" if there is no way."""
    for dump in (_as_python_does, _without_constructor):
        try:
            body = dump(exception)
            if _equal(exception, _load(body)):
                return body
        except Exception:  # the next way, or the text alone
            continue
    return b""


def _as_python_does(exception: Exception) -> bytes:
    return _dumps((_same, (exception,)))


def _without_constructor(exception: Exception) -> bytes:
    attributes = {name: value for name, value in vars(exception).items() if _travels(value)}
    args = tuple(value if _travels(value) else _text_of(value) for value in exception.args)
    return _dumps((_rebuilt, (type(exception), args, attributes)))


def _load(body: bytes) -> Any:
    rebuild: Callable[..., Any]
    rebuild, args = cloudpickle.loads(body)
    return rebuild(*args)


def _same(exception: Exception) -> Exception:
    return exception


def _rebuilt(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    BaseException.__setattr__(error, "args", args)
    vars(error).update(attributes)
    return error


def _equal(exception: Exception, rebuilt: Any) -> bool:
    return type(rebuilt) is type(exception) and _text_of(rebuilt) == _text_of(exception)


def _travels(value: Any) -> bool:
    try:
        cloudpickle.loads(_dumps(value))
    except Exception:
        return False
    return True


def _dumps(value: Any) -> bytes:
    data: bytes = cloudpickle.dumps(value)
    return data


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception as failure:
        return f"<{type(value).__name__} whose text cannot be read: {type(failure).__name__}>"


def _type_name(exception: BaseException) -> str:
    kind = type(exception)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

"""Exceptions come home as their own type and with their own text, or as RemoteError; never as something else."""

import dataclasses
import errno
import pickle
import threading

import pytest
import torch

from torchdl_ray.errors import CollectiveError, RemoteError, RemoteTraceback
from torchdl_ray.remote_exception import pack, traceback_text, unpack


def travelled(error):
    """What the driver gets after a worker has caught `error`, through real bytes."""
    packed = pickle.loads(pickle.dumps(pack(error, rank=3, node="10.0.0.7", step=12, site="train.py:30 in main")))
    return unpack(*packed)


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


class NeedsTwo(Exception):
    def __init__(self, code, place):
        super().__init__(f"code {code} at {place}")
        self.code = code


class KeywordOnly(ValueError):
    def __init__(self, *, shape):
        super().__init__(f"shape {shape}")
        self.shape = shape


class Doubles(Exception):
    """Python's own pickling would call the constructor again and give 'oh, oh, x'."""

    def __init__(self, text):
        super().__init__(f"oh, {text}")


class HoldsALock(RuntimeError):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
        self.code = 7


class NoArguments(Exception):
    def __init__(self, text):
        self.text = text

    def __str__(self):
        return f"text: {self.text}"


class TextBreaks(Exception):
    def __str__(self):
        raise OSError("no text")


class TextNeedsTheLock(Exception):
    def __init__(self):
        self.lock = threading.Lock()

    def __str__(self):
        return f"lock is {self.lock.locked()}"


class Reduces(Exception):
    def __init__(self, code, *, place):
        super().__init__(code)
        self.place = place

    def __reduce__(self):
        return rebuild, (self.args[0], self.place)


def rebuild(code, place):
    return Reduces(code, place=place)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom"),
        ValueError(),
        KeyError("name"),
        OSError(errno.ENOSPC, "no space left", "/data/file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        StopIteration(3),
        ExceptionGroup("two", [ValueError("a"), ExceptionGroup("one", [KeyError("b")])]),
        ImportError("no such", name="thing", path="/there"),
        CollectiveError("rank 1 is gone"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        NeedsTwo(5, "sea"),
        KeywordOnly(shape=(2, 3)),
        Doubles("x"),
        HoldsALock("held"),
        NoArguments("x"),
        TextBreaks("x"),
        Reduces(5, place="sea"),
        Frozen(3),
        ValueError("x" * 1_000_000),
        ValueError(threading.Lock()),
    ],
    ids=lambda error: type(error).__name__,
)
def test_own_type_and_text(error):
    home = travelled(raised(error))
    assert type(home) is type(error)
    if not isinstance(error, TextBreaks):
        assert str(home) == str(error)
    assert isinstance(home.__cause__, RemoteTraceback)
    assert "in raised" in str(home.__cause__)
    assert home.__notes__ == ["raised on worker 3 (node 10.0.0.7) at step 12, called from train.py:30 in main"]


def test_attributes_and_notes_travel():
    error = OSError(errno.ENOSPC, "no space left", "/data/file")
    error.add_note("while saving")
    home = travelled(raised(error))
    assert (home.errno, home.filename) == (errno.ENOSPC, "/data/file")
    assert home.__notes__[0] == "while saving"
    assert travelled(raised(NeedsTwo(5, "sea"))).code == 5
    held = travelled(raised(HoldsALock("held")))
    assert held.code == 7
    assert not hasattr(held, "lock")
    assert travelled(raised(Reduces(5, place="sea"))).place == "sea"


def test_class_of_a_notebook_cell():
    cell = {}
    exec("class Mine(Exception):\n    def __init__(self, a, b): super().__init__(a)", cell)  # no module to import
    home = travelled(raised(cell["Mine"]("boom", 2)))
    assert type(home) is cell["Mine"]
    assert str(home) == "boom"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(2), TextNeedsTheLock()], ids=repr)
def test_what_cannot_be_its_own_type(error):
    home = travelled(raised(error))
    assert type(home) is RemoteError
    assert home.type_name.endswith(type(error).__name__)
    assert str(error) in str(home)
    assert isinstance(home.__cause__, RemoteTraceback)


def test_class_that_the_driver_does_not_have(monkeypatch):
    packed = pack(raised(NeedsTwo(5, "sea")), rank=0, node="n")
    monkeypatch.delitem(globals(), "NeedsTwo")
    home = unpack(*packed)
    assert type(home) is RemoteError
    assert str(home).endswith("NeedsTwo: code 5 at sea")


def test_chain_is_in_the_text():
    try:
        try:
            int("x")
        except ValueError as cause:
            raise NeedsTwo(5, "sea") from cause
    except NeedsTwo as caught:
        text = str(travelled(caught).__cause__)
    assert "invalid literal for int()" in text
    assert "direct cause" in text
    assert "code 5 at sea" in text
    assert __file__ in text


def test_own_frames_are_left_out():
    error = raised_inside_the_package()
    assert "tree.py" not in traceback_text(error).split("in loses")[0]
    assert "in loses" in traceback_text(error)


def raised_inside_the_package():
    """Called through a frame whose file is one of the package's."""
    import torchdl_ray.remote_exception as module

    def loses():
        raise ValueError("boom")

    code = compile(
        "def execute(function):\n    function()", module.__file__.replace("remote_exception", "tree"), "exec"
    )
    frame = {}
    exec(code, frame)
    try:
        frame["execute"](loses)
    except ValueError as caught:
        return caught.with_traceback(caught.__traceback__.tb_next)


def test_where_without_a_step():
    home = unpack(*pack(raised(ValueError("x")), rank=1, node="n"))
    assert home.__notes__ == ["raised on worker 1 (node n)"]

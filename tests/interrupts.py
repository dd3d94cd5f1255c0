"""A group whose calls are interrupted as by Ctrl-C, and a training loop that goes on after an interrupt."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdl_ray import DataParallel, workforce
from torchdl_ray.local_group import LocalGroup

WARM_UP_STEPS = 4  # the first three calls of a kind wait for their structure


class Interrupted:
    """A group that raises KeyboardInterrupt at the `number`-th call of `verb`, before or after it was done."""

    is_local = True

    def __init__(self, group: LocalGroup) -> None:
        self.group = group
        self.size, self.members, self.devices = group.size, group.members, group.devices
        self.put, self.stop, self.close = group.put, group.stop, group.close
        self.verb, self.number, self.after = "", 0, False
        self.calls = {"send": 0, "receive": 0}
        self.raised = False

    def arm(self, verb: str, number: int, after: bool) -> None:
        self.verb, self.number, self.after, self.raised = verb, number, after, False
        self.calls = {"send": 0, "receive": 0}

    def send(self, rank: int, message: Any, payload: Mapping[int, Sequence[Any]]) -> None:
        self._call("send", lambda: self.group.send(rank, message, payload))

    def receive(self, timeout_s: float, arrived: list[Any]) -> None:
        self._call("receive", lambda: self.group.receive(timeout_s, arrived))

    def _call(self, verb: str, do: Callable[[], None]) -> None:
        self.calls[verb] += 1
        now = verb == self.verb and self.calls[verb] == self.number
        self.raised |= now
        if now and not self.after:
            raise KeyboardInterrupt
        do()
        if now:
            raise KeyboardInterrupt


class AtLine:
    """Raises KeyboardInterrupt at the `number`-th line of `files` that this thread runs inside of the `with`."""

    def __init__(self, number: int, files: Sequence[str]) -> None:
        self.number, self.files = number, tuple(files)
        self.count = 0

    @property
    def raised(self) -> bool:
        return self.count >= self.number

    def __enter__(self) -> AtLine:
        self.old = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(self.old)

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


class Shaky(nn.Module):
    """BatchNorm and dropout: whatever is done twice shows. Returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.dropout(torch.relu(self.norm(self.first(x))), 0.3, self.training)
        return F.cross_entropy(self.last(hidden), y)


def batch(step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 2, (rows,), generator=generator)


class Loop:
    """A model, its optimizer and steps that are finished after an interrupt; the first three calls are behind it."""

    def __init__(self, monkeypatch: Any, workers: int) -> None:
        torch.manual_seed(0)
        self.group = Interrupted(LocalGroup(workers))
        with monkeypatch.context() as patch:
            patch.setattr(workforce, "LocalGroup", lambda *args: self.group)
            self.model = DataParallel(Shaky(), workers, backend="local")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for step in range(WARM_UP_STEPS):
            self.step(1000 + step)

    def step(self, number: int) -> float:
        return self.finish(self.begin(number))

    def begin(self, number: int) -> Tensor:
        """All of a step that sends nothing."""
        self.optimizer.zero_grad()
        loss = self.model(*batch(number))
        loss.backward()
        return loss

    def finish(self, loss: Tensor, interrupt: AtLine | None = None) -> float:
        """Step once and read the loss, however often that is interrupted; `interrupt` is around the user's verbs."""
        before = self.model.version
        while self.model.version == before:
            self.insist(self.optimizer.step, interrupt, again=False)
        return self.insist(loss.item, interrupt)

    def insist(self, do: Callable[[], Any], interrupt: AtLine | None, again: bool = True) -> Any:
        while True:
            try:
                with interrupt or contextlib.nullcontext():
                    return do()
            except KeyboardInterrupt:
                if not again:
                    return None

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers and momentum."""
        found = {k: v.clone() for k, v in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            found[f"momentum {number}"] = values["momentum_buffer"].clone()
        return found

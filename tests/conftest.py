"""What all tests share: one thread per process, hypothesis without deadlines, and the handwritten digits."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils.data import TensorDataset

# The first examples of a test pay for imports and process starts, so that a time limit per example says nothing; a
# hang is caught by pytest's own time limit. CI draws the same examples each time.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def single_thread() -> None:
    """Gives each test one torch thread: several workers share few cores, and the order of additions stays fixed."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits() -> TensorDataset:
    """Scikit-learn's handwritten digits: images [1797, 1, 8, 8] float32 in 0..1, labels [1797] int64."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).to(torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.from_numpy(data.target).to(torch.int64))

"""Every example runs from the command line as its first lines say, and shows what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROMISES = {
    "ddp_recipe.py": r"same weights",
    "torch_dl_port.py": r"all parts agree with plain PyTorch",
    "train_digits.py": r"all replicas are equal, by their hashes: (\w+) = \1\n",
}


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs an example in a process of its own, with a Ray of its own."""
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), *arguments],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": "local"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,  # seconds, below the limit of the test
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example(example: str):
    done = run(example, *(["--num-workers", "2"] if example == "train_digits.py" else []))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(PROMISES[example], done.stdout), done.stdout


def test_digits_without_ray_and_without_success():
    done = run("train_digits.py", "--num-workers", "0", "--epochs", "1")
    assert done.returncode == 1
    assert re.search(r"test accuracy 0\.\d+ is below 0\.97", done.stderr), done.stderr

"""The peers live in an environment of their own; what is compared passes between the two as files."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are a folder beside the tests, not an installed package
PYTHON = ROOT / ".venv-peers" / "bin" / "python"


@pytest.fixture(scope="session")
def run_with_peers() -> Callable[..., str]:
    """Runs a script of this folder in the peers' environment, with our package on its path; gives its output."""
    if not PYTHON.exists():
        pytest.skip("the peers' environment .venv-peers was not found: run `make peers`")

    def run(script: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(PYTHON), str(Path(__file__).parent / script), *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run

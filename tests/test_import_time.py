"""`import unequal` needs torch and numpy alone. How long it takes is a benchmark: benchmarks/import_time.py."""

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("pyarrow", "typer", "rich", "tensorboard", "torchrec", "fbgemm_gpu", "pandas", "scipy")
SCRIPT = """
import json, sys
import torch, numpy
before = set(sys.modules)
import unequal; unequal.Embeddings  # names are imported when first used
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def test_the_command_line_waits_for_no_torch():
    """The process that starts ranks has nothing to compute, and its ranks load torch themselves."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, unequal.cli.launch; assert 'torch' not in sys.modules"], timeout=120
    )
    assert done.returncode == 0


THREADS = """
import atexit, os, sys
from unequal.cli import main
atexit.register(lambda: print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules))
sys.argv = ["unequal", "--version"]
main()
"""


@pytest.mark.parametrize(
    ("given", "found"), [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_are_told_to_sleep_soon_before_torch_is_there(given, found):
    """OpenMP looks when it is loaded, which torch does."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], env=known | given, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == f"{found} False"


def test_import_pulls_in_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    added = json.loads(done.stdout)
    assert "unequal" in added
    assert [name for name in added if name in HEAVY] == []

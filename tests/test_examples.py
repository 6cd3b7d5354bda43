"""The examples run as they are."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_ten_lines_of_python_learn() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "ten_lines.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.2

"""What a benchmark gives back, where it was measured, and the file that keeps it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class BenchmarkError(Exception):
    """A benchmark that cannot be run or must not be reported."""


def spread(samples: Iterable[float], scale: float = 1.0) -> dict[str, float]:
    """Median and quartiles."""
    ordered = sorted(value * scale for value in samples)
    if not ordered:
        raise BenchmarkError("no samples to summarise")
    low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4), "samples": len(ordered)}


def cell(values: dict[str, float] | None, digits: int = 1) -> str:
    """A spread as text: median, and the quartiles behind it."""
    if values is None:
        return "–"
    return f"{values['median']:.{digits}f} ({values['low']:.{digits}f}–{values['high']:.{digits}f})"


def text_of(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def machine() -> dict[str, Any]:
    """The hardware, without anything that names this very machine."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in text_of("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor() or "unknown",
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "huge_pages": text_of("/sys/kernel/mm/transparent_hugepage/enabled"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.rstrip()


def stamp(quick: bool) -> dict[str, Any]:
    """Where, when and from which source a result came."""
    checkout = (ROOT / ".git").exists()
    changed = checkout and git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return {
        "machine": machine(),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
        "commit": git("rev-parse", "HEAD") if checkout else "not a git checkout",
        "dirty": bool(changed),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
    }


def merge(path: Path, parts: dict[str, Any], order: Sequence[str]) -> None:
    """Puts the parts that were run into the file and leaves the others as they are; the file is replaced as a whole."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept.update(parts)
    ordered = {name: kept[name] for name in order if name in kept}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".partial")
    fresh.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    os.replace(fresh, path)

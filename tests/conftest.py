"""Shared by all tests: real data where it is, a fixed thread count, and memory that is poisoned before it is given out."""

import os
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from .click_log import write_click_log
from .interpreter import hasten
from .poison import poison_memory

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    hasten()
if "PYTEST_XDIST_WORKER" in os.environ:  # other tests run beside: one thread each, and none that spins while it waits
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes depends on what runs beside; speed is measured in benchmarks.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
LONGEST = ("distributed", "kernels", "width", "peers", "train")
"""folders that are begun with, so that no process has a long file left when the others are done"""
SHARED_DATA = Path(__file__).resolve().parents[1] / "../shared/data"


def pytest_collection_modifyitems(items):
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.parent.name, len(rank)))


@pytest.fixture
def shared_data():
    """A function that gives a folder of real data by name, or skips."""

    def folder(name: str) -> Path:
        path = SHARED_DATA / name
        if not path.is_dir():
            pytest.skip(f"real data not found: ../shared/data/{name}")
        return path

    return folder


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh uninitialised memory holds NaN (or a large number), so that a value that was never written shows."""
    poison_memory(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def keep_thread_count():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def clicks(tmp_path):
    """The recipe of a small click log."""
    return write_click_log(tmp_path / "clicks")


@pytest.fixture(scope="module")
def shared_clicks(tmp_path_factory):
    """The same for all tests of a module, which leave it as it is."""
    return write_click_log(tmp_path_factory.mktemp("data") / "clicks")

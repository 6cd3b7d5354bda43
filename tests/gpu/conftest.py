"""Tests that need a GPU skip where there is none."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated data is made once for all tests here, and not where the user keeps it."""
    monkeypatch.setenv("UNEQUAL_CACHE", str(tmp_path_factory.getbasetemp() / "generated"))

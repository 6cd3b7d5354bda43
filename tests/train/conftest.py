import pytest
import torch


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here holds on the CPU, and is tested there wherever the tests run; tests/gpu is for GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

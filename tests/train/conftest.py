from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def no_gpu() -> Iterator[None]:
    """What is tested here holds on the CPU, and is tested there wherever the tests run; tests/gpu is for GPUs. For whole
    modules, so that it holds for the runs that a module's tests share, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield

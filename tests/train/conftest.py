from collections.abc import Iterator

import pytest
import torch

from unequal.plan.placement import KINDS

from .worlds import TRUTHS, good, make_placement, make_truths, save_world


@pytest.fixture(autouse=True, scope="module")
def no_gpu() -> Iterator[None]:
    """What is tested here holds on the CPU, and is tested there wherever the tests run; tests/gpu is for GPUs. For whole
    modules, so that it holds for the runs that a module's tests share, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def saved_in_every_kind(tmp_path_factory):
    """Kind → the checkpoint of 4 ranks on 2 nodes."""
    folders = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        (path, *_) = good(save_world(folder, 1, TRUTHS, make_placement(TRUTHS, kind, 4, 2)))
        folders[kind] = path
    return folders


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of 3 ranks whose every byte can be tried."""
    truths = make_truths(rows=5, ids=6, dim=4)
    folder = tmp_path_factory.mktemp("small")
    placement = make_placement(truths, ("row_wise", "column_wise"), 3)
    (path, *_) = good(save_world(folder, 3, truths, placement))
    return path, truths, placement

"""Batches convert from and to TorchRec's KeyedJaggedTensor without copying. The checks are in torchrec_side.py."""

from collections.abc import Callable


def test_conversion_shares_memory(run_with_peers: Callable[..., str]) -> None:
    passed = [line.split()[1] for line in run_with_peers("torchrec_side.py").splitlines() if line.startswith("passed ")]
    assert passed == ["from", "from_weighted", "to", "to_weighted", "offsets_alone", "empty", "lookup"]

"""Tests against the peers: torch.optim, FBGEMM, TorchRec."""

"""Benchmarks beside the peers. `python -m benchmarks` runs them all and writes benchmarks/results/cpu.json."""

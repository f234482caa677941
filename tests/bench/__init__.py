"""Benchmarks: ours beside its peers and beside the floor, from one run. Started by `scripts/bench`."""

"""Benchmarks of the scheduler, for `quire bench`."""

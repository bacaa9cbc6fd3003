"""Benchmarks of the gateway, for `quire bench`."""

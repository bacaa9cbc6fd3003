"""Benchmarks of the storage engine; `quire bench` finds them by the entry points of this package."""

"""Benchmarks of images, for `quire bench`."""

"""Quire from a terminal: commands, a cluster on one machine, the demo, benchmarks, plans."""

"""Real engines on this machine, for demos, tests and benchmarks."""

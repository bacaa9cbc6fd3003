"""Real engines with Quire: how they are made, and `quire bench engines`."""

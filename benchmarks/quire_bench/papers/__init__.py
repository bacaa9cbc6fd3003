"""Published systems and experiments, played again: baselines of `quire bench`, and no part of Quire."""

"""The pool of the drives: its format, its map, its slots."""

"""The terms of Quire as values: no I/O, no clock, nothing but the standard library, numpy and hashes."""

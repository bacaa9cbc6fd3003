"""Decisions that several services take: no await, no clock, no I/O."""

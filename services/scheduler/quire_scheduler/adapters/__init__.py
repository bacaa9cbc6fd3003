"""Adapters of the scheduler's ports."""

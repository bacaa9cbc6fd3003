"""Decisions only: no await, no clock, no network."""

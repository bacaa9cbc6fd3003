"""The prefix index in Redis."""

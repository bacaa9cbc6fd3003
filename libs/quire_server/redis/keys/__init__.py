"""Access keys in Redis."""

"""The scheduler's half of the connector: what is loaded and stored, and when."""

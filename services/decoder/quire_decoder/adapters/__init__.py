"""The real ends of the ports."""

"""The valve: who gets how much of the shared link, per epoch."""

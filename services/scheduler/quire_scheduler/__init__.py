"""The scheduler: how much of a shared link each delivery gets, per epoch."""

"""The gateway: what clients call. Stateless; bulk bytes never pass through it."""

"""The public face of the cluster. Stateless; bulk bytes never pass through it."""

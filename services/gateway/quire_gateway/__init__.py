"""The door: the public gRPC face of the cluster. Stateless; bulk bytes never pass through it."""

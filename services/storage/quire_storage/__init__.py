"""The muscle: chunks in preallocated slots, layer assembly, delivery by RDMA."""

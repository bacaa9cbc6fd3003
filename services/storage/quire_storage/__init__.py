"""The storage node: chunks in preallocated slots, layer assembly, delivery by RDMA."""

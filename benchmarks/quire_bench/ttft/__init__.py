"""`quire bench ttft`."""

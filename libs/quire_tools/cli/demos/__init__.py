"""`quire demo`, `quire demo-images`, `quire demo-vllm`."""

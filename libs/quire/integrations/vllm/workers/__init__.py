"""The workers' half of the connector: bytes between storage nodes and vLLM's blocks."""

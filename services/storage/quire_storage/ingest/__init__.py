"""Stores: chunks from memory of clients into the tiers, at once or layer by layer as clients announce them."""

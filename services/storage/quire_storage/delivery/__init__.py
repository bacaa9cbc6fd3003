"""Deliveries: chunks from the tiers into memory of clients, layer by layer, at the rates that the scheduler grants."""

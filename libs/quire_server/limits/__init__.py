"""Bounds that callers and tenants share."""

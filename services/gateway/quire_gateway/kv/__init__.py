"""KV transfers: leases, fetches and stores, reads of single chunks, retention, and following cache events."""

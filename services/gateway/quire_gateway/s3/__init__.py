"""The S3 door: an endpoint for ordinary S3 clients, over HTTP and HTTPS.

A request's way: `door` (connection, signature, which operation) → `buckets` or `objects` (one method per operation) →
`house` (which space a name means for this caller) → `spaces` (what is in it).
"""

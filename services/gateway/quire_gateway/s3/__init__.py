"""The S3 frontend: an endpoint for ordinary S3 clients, over HTTP and HTTPS.

A request's way: `frontend` (connection, signature, which operation) → `buckets` or `objects` (one method per
operation) → `backends` (which backend a name means for this caller) → `backend` (its content).
"""

"""Buckets of the S3 frontend in Redis."""

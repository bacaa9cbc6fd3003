"""Ceph's tests of S3 against a local cluster."""

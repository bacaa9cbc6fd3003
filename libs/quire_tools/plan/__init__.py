"""`quire plan`: needs and costs of a deployment, computed before it exists."""

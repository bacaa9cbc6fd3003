"""Authorization of callers: certificates, roles, permits."""

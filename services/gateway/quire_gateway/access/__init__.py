"""Access control: identity of callers, permissions, and the audit log."""

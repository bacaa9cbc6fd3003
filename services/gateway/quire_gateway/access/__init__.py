"""Access: who calls, what a caller may do, and the audit log."""

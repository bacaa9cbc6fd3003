"""Who may call what: certificates, roles, permits."""

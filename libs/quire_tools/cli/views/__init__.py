"""Views of a running cluster: its members, deliveries, traces and events."""

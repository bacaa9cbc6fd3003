"""The blocking client, for engines without an event loop."""

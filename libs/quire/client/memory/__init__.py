"""Memory that storage nodes use: lent, proved to be reachable, and taken back when no node uses it."""

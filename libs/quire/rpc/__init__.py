"""gRPC as Quire uses it: channels, servers with health and reflection, one table of errors, conversions."""

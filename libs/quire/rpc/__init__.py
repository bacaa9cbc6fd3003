"""gRPC as Quire uses it: channels with deadlines, servers with health and reflection, one table of errors, conversions."""

"""The gRPC frontends: decode, admit, call, answer."""

"""The gRPC interface between processes: messages, their conversion to and from the model, errors, channels."""

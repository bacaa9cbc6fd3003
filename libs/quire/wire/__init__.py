"""What crosses between processes by gRPC: messages, their conversion to and from the model, errors, channels."""

"""Generated from protos/quire/v1 by `make proto`."""

"""The scheduler's half of the connector: the choice of loads and stores."""

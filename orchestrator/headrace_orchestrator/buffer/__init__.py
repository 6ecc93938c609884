"""The durable side of the replay buffer: log, projection, ownership of the data directory."""

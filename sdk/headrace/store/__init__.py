"""The format of a data directory, and readers of it."""

"""Read-only queries of the scheduler's state."""

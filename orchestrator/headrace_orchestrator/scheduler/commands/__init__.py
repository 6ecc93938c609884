"""Commands of the scheduler: each decides and emits events."""

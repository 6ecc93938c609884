"""The scheduler's state: runs, groups, batches, workers and what they are made of."""

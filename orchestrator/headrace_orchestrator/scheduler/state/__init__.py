"""The scheduler's state: runs, groups, batches, evaluations and workers."""

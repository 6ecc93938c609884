"""Limits on what a run admits and dispatches, and the tasks and adapters of the groups that it admits."""

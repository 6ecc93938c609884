"""Limits on admission and dispatch of a run, and the tasks and adapters of the groups that it admits."""

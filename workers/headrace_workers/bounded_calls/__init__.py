"""Calls that may never return: each runs in its own process, with a deadline and a memory limit."""

from headrace_workers.bounded_calls.client import BoundedCalls, LimitExceeded

__all__ = ["BoundedCalls", "LimitExceeded"]

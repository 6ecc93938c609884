"""Calls that may take for ever: each in a process of its own, with a deadline and a bound of memory."""

from headrace_workers.bounded_calls.client import BoundedCalls, Exhausted

__all__ = ["BoundedCalls", "Exhausted"]

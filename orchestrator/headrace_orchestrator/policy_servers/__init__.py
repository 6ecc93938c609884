"""Decisions about the policy servers of a run, and the calls to them: states, weights, adapters, capacity."""

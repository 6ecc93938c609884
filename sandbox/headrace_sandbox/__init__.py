"""Isolated execution: run anything that a model writes."""

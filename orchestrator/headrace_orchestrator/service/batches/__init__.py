"""Batches of a service: building the head of a planned batch, and serving bodies."""

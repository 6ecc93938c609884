"""Batches of a service: heads of planned batches, and bodies to serve."""

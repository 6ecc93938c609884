"""Batches: their format and manifest, and how they are built, packed into bins and sharded."""

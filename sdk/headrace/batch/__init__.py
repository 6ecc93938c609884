"""Batches: their bytes, their manifest, and how they are built, packed and sharded."""

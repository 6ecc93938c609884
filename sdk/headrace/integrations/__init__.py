"""Adapters to other people's trainers. Nothing here is imported by ``headrace`` itself, and nothing here imports a
trainer: each adapter has the shape that its trainer looks for."""

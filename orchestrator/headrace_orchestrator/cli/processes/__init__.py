"""Child processes of ``headrace up`` and ``headrace demo``: their supervisor and their command lines."""

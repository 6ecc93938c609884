"""Programs that are run inside sandboxes, by the Python there; what it needs of them is put there as files."""

"""Programs that are run inside sandboxes, by the Python there."""

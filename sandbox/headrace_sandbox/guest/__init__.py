"""Programs that run inside sandboxes, by the Python there, which gets them as files."""

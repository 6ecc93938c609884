"""Programs that run inside sandboxes, on the Python there, which receives them as text."""

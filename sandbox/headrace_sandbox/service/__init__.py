"""The HTTP service that shares a host's sandboxes."""

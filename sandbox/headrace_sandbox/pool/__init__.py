"""A host's sandboxes, shared fairly: what is run, when, in which sandbox, and for how long."""

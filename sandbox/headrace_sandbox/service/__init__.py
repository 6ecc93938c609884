"""A host's sandboxes as a service, over HTTP."""

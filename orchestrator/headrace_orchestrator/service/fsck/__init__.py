"""`headrace fsck`: checking a data directory, and rebuilding its projection."""

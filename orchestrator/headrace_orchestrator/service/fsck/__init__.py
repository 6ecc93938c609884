"""`headrace fsck`: the check of a data directory, and the rebuild of its projection."""

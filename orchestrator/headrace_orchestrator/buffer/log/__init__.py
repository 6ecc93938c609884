"""The log: append-only files, and the process that writes them."""

"""What isolates a sandbox."""

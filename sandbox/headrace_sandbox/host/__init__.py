"""The host's side of a sandbox: processes, control groups, descriptors, clean-up."""

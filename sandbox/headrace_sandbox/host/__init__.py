"""The host's side of a sandbox: processes, control groups, descriptors, system-call filter, clean-up."""

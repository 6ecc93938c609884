"""The runtime ``gvisor``: a kernel in user space for each sandbox."""

"""Parts shared by several runtimes."""

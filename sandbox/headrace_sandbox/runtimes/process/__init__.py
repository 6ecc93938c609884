"""The runtime ``process``: no isolation."""

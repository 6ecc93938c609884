"""The runtime ``bubblewrap``: namespaces on Linux."""

"""HTTP client code shared by workers, sandbox clients and the SDK."""

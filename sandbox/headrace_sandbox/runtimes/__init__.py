"""The runtimes: ways to isolate a sandbox, one package each, and the parts they share."""

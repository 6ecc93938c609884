"""The client of the orchestrator: one set of operations, driven by blocking or asynchronous sockets."""

"""The orchestrator's clients: one set of operations, run over blocking or asynchronous sockets."""

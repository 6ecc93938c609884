"""I/O for ``headrace_orchestrator.policy_servers``, which decides: watches of servers, adapters, DNS lookups."""

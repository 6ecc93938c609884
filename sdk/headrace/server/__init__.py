"""Parts shared by the HTTP services of Headrace: orchestrator and sandbox service. The contract imports none."""

"""Parts shared by the processes of Headrace: orchestrator, sandbox service and worker. The contract imports none."""

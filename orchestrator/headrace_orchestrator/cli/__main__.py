"""``python -m headrace_orchestrator.cli``: how components that are started as processes are called."""

from headrace_orchestrator.cli import main

main()

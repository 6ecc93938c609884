"""``python -m headrace_orchestrator.cli``: the command line of components that are started as processes."""

from headrace_orchestrator.cli import main

main()

"""The command line ``headrace``: one module per command, mounted in :mod:`headrace_orchestrator.cli.app`."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""Exit code of a command that SIGINT ended, as in shells."""


def main() -> None:
    """Entry point of the script ``headrace``."""
    try:
        from headrace_orchestrator.cli.app import cli
    except KeyboardInterrupt:  # an import was interrupted, before any work began
        raise SystemExit(INTERRUPTED) from None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("headrace"):
            raise
        sys.stderr.write(
            f"The command line needs {error.name}, which is not installed. Run: pip install 'headrace[server]'\n"
        )
        raise SystemExit(1) from error
    cli(prog_name="headrace")

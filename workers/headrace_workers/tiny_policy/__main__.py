"""``python -m headrace_workers.tiny_policy``."""

from headrace_workers.tiny_policy.cli import command

if __name__ == "__main__":
    command()

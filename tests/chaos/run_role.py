"""``python -m tests.chaos.run_role ROLE FOLDER NAME URL``: one process of a campaign, without a crash point."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.chaos.plan import Plan
from tests.chaos.roles import ROLES


def main(role: str, folder: str, name: str, url: str) -> None:
    """Run the role. An orchestrator listens on the port of the address; the others connect to it."""
    ROLES[role](Plan(folder=Path(folder), url=url, port=urlsplit(url).port or 0, name=name))


if __name__ == "__main__":
    main(*sys.argv[1:])

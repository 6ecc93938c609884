"""Descriptors of a process with many connections.

* The soft limit of this process's descriptors is raised to the hard one.
"""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """Raise the soft limit of this process's descriptors to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

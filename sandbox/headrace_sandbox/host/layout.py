"""The paths and variables that a program finds inside a sandbox, the same under every runtime."""

from __future__ import annotations

from collections.abc import Mapping

SCRATCH = "/scratch"
"""The scratch folder of a sandbox: a program's working folder, home folder and files."""

PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin"

USR_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders of the root that are links into /usr on a merged system."""

SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


def program_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a program: the usual variables, and those given."""
    return {"PATH": PROGRAM_PATH, "HOME": SCRATCH, "LANG": "C.UTF-8", **variables}

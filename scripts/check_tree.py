"""Checks that no file of the repository holds an address or a path of one particular machine.

* No file names a package registry: locks must install from whichever registry the user has.
* No file names a home or work directory of a machine.
* No file holds an address outside the loopback and documentation ranges, but for the customary 10.0.0.1. A pinned
  version, ``==13.4.1.3``, is none.

Prints each finding as ``file:line: what: text`` and ends with status 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

PATTERNS = {
    "a package registry": re.compile(r"pythonhosted|\bpypi\.org|npmjs\.(?:org|com)|proxy\.golang|crates\.io"),
    "a directory of one machine": re.compile(r"(?<![\w.:/}])/(?:work|root|home|Users)/[\w.]"),
    "an IP address": re.compile(
        r"(?<![\w.])(?<!==)(?!127\.|0\.0\.0\.0|10\.0\.0\.1(?!\d)|192\.0\.2\.|198\.51\.100\.|203\.0\.113\.)(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"
    ),
}


class Finding(NamedTuple):
    file: str
    line: int
    what: str
    text: str


def files() -> list[Path]:
    """Every file that is tracked, or would be if it were added."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and path != Path(__file__).resolve()]


def findings(path: Path) -> list[Finding]:
    """What is wrong in one file; a file that is no UTF-8 text has nothing to say."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    return [
        Finding(str(path.relative_to(ROOT)), number, what, match.group(0))
        for number, line in enumerate(lines, start=1)
        for what, pattern in PATTERNS.items()
        if (match := pattern.search(line))
    ]


def main() -> int:
    found = [finding for path in files() for finding in findings(path)]
    for finding in found:
        sys.stdout.write(f"{finding.file}:{finding.line}: {finding.what}: {finding.text}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

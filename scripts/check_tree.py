"""Check that no file of the repository contains an address or a path of a particular machine.

* No file names a package registry: locks must install from the user's own registry.
* No file names a home or work directory of a machine.
* No file contains an IP address outside the loopback and documentation ranges, except the customary 10.0.0.1. A pinned
  version such as ``==13.4.1.3`` is not an address.

Prints each finding as ``file:line: what: text``; the exit code is 1 if there are any.
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
    """Return every file that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and path != Path(__file__).resolve()]


def findings(path: Path) -> list[Finding]:
    """Return the findings in one file; a file that is not UTF-8 text has none."""
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
    all_findings = [finding for path in files() for finding in findings(path)]
    for finding in all_findings:
        sys.stdout.write(f"{finding.file}:{finding.line}: {finding.what}: {finding.text}\n")
    return 1 if all_findings else 0


if __name__ == "__main__":
    sys.exit(main())

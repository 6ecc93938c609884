"""Files of a container: its scratch folder is in memory, which only a program inside can reach.

* Content is put there by the image's Python, or its ``tar``.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.errors import SandboxFailure
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.docker_container import Image
from headrace_sandbox.runtimes.docker_exec import Container

BEGIN = (Path(__file__).parent.parent / "inside" / "begin.py").read_text()
"""Puts files in place and is the program then, where the image has Python."""

TOOL_LIMITS = Limits(wall_s=60.0, kept_bytes=4096, output_bytes=1 << 20)
"""For what runs inside for us."""


def begin(
    files: Mapping[str, bytes], arguments: Sequence[str], stdin: bytes, code: str | None = None
) -> tuple[list[str], bytes]:
    """The command and its input that put files in place first, and are the program then."""
    coded = {path: base64.b64encode(content).decode() for path, content in files.items()}
    request = json.dumps({"files": coded, "arguments": list(arguments), "code": code}).encode()
    return ["python3", "-I", "-c", BEGIN], len(request).to_bytes(8, "big") + request + stdin


async def put(container: Container, image: Image, files: Mapping[str, bytes]) -> None:
    """Put files into the scratch folder. Raises SandboxFailure ``image-unfit``, ``disk-full``."""
    if not files:
        return
    if "python3" in image.programs:
        arguments, stdin = begin(files, ["true"], b"")
    else:
        require(image, "tar")
        arguments, stdin = ["tar", "-xf", "-"], _archive(files)
    ended = await container.run(arguments, stdin, [], TOOL_LIMITS, only=False)
    if ended.returncode != 0:
        raise SandboxFailure(
            f"Files could not be put into the sandbox: {ended.seen.stderr.text.strip()[-300:]}",
            hint="Is there room for them in `disk_bytes`?",
            kind="disk-full",
            retryable=False,
        )


def require(image: Image, program: str) -> None:
    """Raises SandboxFailure ``image-unfit`` for an image that has no such program."""
    if program not in image.programs:
        raise SandboxFailure(
            f"The image {image.id} has no {program}, which this needs.",
            hint=f"Choose an image that has {program} on its PATH.",
            kind="image-unfit",
            retryable=False,
        )


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()

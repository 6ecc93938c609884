"""Programs that start in a container by exec, with their files and input on standard input.

* Guest modules come as text, and run on the image's Python: an image has no folder for them.
* Without Python in the image, files are unpacked by its ``tar``.
* Arguments and variables that the kernel would refuse are refused before anything runs.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.errors import SandboxFailure
from headrace_sandbox.host.layout import SCRATCH
from headrace_sandbox.host.processes import command_too_large
from headrace_sandbox.runtimes.docker.container_settings import DockerImage
from headrace_sandbox.runtimes.shared.guest_modules import LOAD_MODULES, guest_texts

LOADER = f"""{LOAD_MODULES}
import json, os
def exactly(count):
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            sys.exit(126)
        data += part
    return data
request = json.loads(exactly(int.from_bytes(exactly(8), "big")))
sys.argv[1:] = request["arguments"]
load(request["modules"]).main()
"""
"""Reads a length of eight bytes and as much JSON, makes modules from it, and runs the last one."""

MOST_STRING_BYTES, MOST_BYTES = 128 << 10, 2 << 20
"""Linux's limits for one argument or variable, and for all together."""


class ExecProgram(NamedTuple):
    """A program to start by exec. ``variables``: NAME=VALUE, in addition to those of its image."""

    arguments: Sequence[str]
    stdin: bytes = b""
    variables: Sequence[str] = ()


def module_program(modules: Sequence[str], arguments: Sequence[str], *, site: bool = False) -> ExecProgram:
    """The program that runs the last of these guest modules; each must come after those that it imports. ``site``: with
    the image's Python packages."""
    request = json.dumps({"modules": guest_texts(modules), "arguments": list(arguments)}).encode()
    options = ["-I"] if site else ["-I", "-S"]
    return ExecProgram(["python3", *options, "-c", LOADER], len(request).to_bytes(8, "big") + request)


def program_with_files(files: Mapping[str, bytes], arguments: Sequence[str], code: str | None = None) -> ExecProgram:
    """The program that writes its files first, and then becomes a command or a Python program."""
    encoded_files = {path: base64.b64encode(content).decode() for path, content in files.items()}
    request = json.dumps({"files": encoded_files, "arguments": list(arguments), "code": code})
    return module_program(["entrypoint"], [request], site=True)


def unpacking_program(files: Mapping[str, bytes]) -> ExecProgram:
    """The program that writes files by ``tar``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return ExecProgram(["tar", "-xf", "-"], buffer.getvalue())


def program_variables(variables: Mapping[str, str]) -> list[str]:
    """The variables of a program in addition to those of its image."""
    return [f"{name}={value}" for name, value in {"HOME": SCRATCH, "LANG": "C.UTF-8", **variables}.items()]


def check_size(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Check that the kernel accepts the arguments and variables. Raises SandboxFailure ``command-too-large``."""
    sizes = [len(piece.encode(errors="surrogateescape")) + 1 for piece in (*arguments, *program_variables(variables))]
    if max(sizes) >= MOST_STRING_BYTES or sum(sizes) >= MOST_BYTES:
        raise command_too_large()


def require_program(image: DockerImage, program: str, purpose: str) -> None:
    """Check that an image has a program. Raises SandboxFailure ``image-unfit``."""
    if program not in image.programs:
        raise SandboxFailure(
            f"The image {image.id} has no {program}, which is needed for {purpose}.",
            hint=f"Choose an image that has {program} on its PATH.",
            kind="image-unfit",
            retryable=False,
        )


def files_not_written(message: str) -> SandboxFailure:
    """The failure of files that could not be written into a sandbox."""
    return SandboxFailure(
        f"Files could not be put into the sandbox: {message.strip()[-300:]}",
        hint="Is `disk_bytes` large enough for them?",
        kind="disk-full",
        retryable=False,
    )

"""How programs and files come into a container: over the standard input of what starts there.

* Modules of ours come as text, and run on the image's Python; an image has no folder where they could lie.
* Without Python in the image, files come in by its ``tar``.
* What the kernel would not take as arguments or variables is refused before anything runs.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Mapping, Sequence

from headrace.errors import SandboxFailure
from headrace_sandbox.host import bwrap
from headrace_sandbox.host.bwrap import SCRATCH
from headrace_sandbox.runtimes.docker.container import Image
from headrace_sandbox.runtimes.docker.exec import Brought, Ended
from headrace_sandbox.runtimes.shared.guest_programs import HERE

LOADER = """
import json, os, sys
def exactly(count):
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            sys.exit(126)
        data += part
    return data
request = json.loads(exactly(int.from_bytes(exactly(8), "big")))
for name in ("headrace_sandbox", "headrace_sandbox.guest"):
    sys.modules[name] = type(sys)(name)
for name, text in request["modules"]:
    module = sys.modules["headrace_sandbox.guest." + name] = type(sys)(name)
    setattr(sys.modules["headrace_sandbox.guest"], name, module)
    exec(compile(text, name, "exec"), module.__dict__)
sys.argv[1:] = request["arguments"]
module.main()
"""
"""Reads a length of eight bytes and as much JSON, makes modules of it, and runs the last one."""

MOST_PIECE_BYTES, MOST_BYTES = 128 << 10, 2 << 20
"""Of one argument or variable, and of all of them, as Linux takes them."""


def module(modules: Sequence[str], arguments: Sequence[str], *, site: bool = False) -> Brought:
    """The program that runs the last of these modules of ours; each comes after those that it imports. ``site``:
    with the packages that the image has."""
    texts = [(name, (HERE / f"{name}.py").read_text()) for name in modules]
    request = json.dumps({"modules": texts, "arguments": list(arguments)}).encode()
    options = ["-I"] if site else ["-I", "-S"]
    return Brought(["python3", *options, "-c", LOADER], len(request).to_bytes(8, "big") + request)


def begin(files: Mapping[str, bytes], arguments: Sequence[str], code: str | None = None) -> Brought:
    """The program that puts files in place first, and is a command or a Python program then."""
    coded = {path: base64.b64encode(content).decode() for path, content in files.items()}
    request = json.dumps({"files": coded, "arguments": list(arguments), "code": code})
    return module(["entrypoint"], [request], site=True)


def unpack(files: Mapping[str, bytes]) -> Brought:
    """The program that puts files in place by ``tar``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return Brought(["tar", "-xf", "-"], buffer.getvalue())


def variables(given: Mapping[str, str]) -> list[str]:
    """The variables that a program gets beside those of its image."""
    return [f"{name}={value}" for name, value in {"HOME": SCRATCH, "LANG": "C.UTF-8", **given}.items()]


def check_size(arguments: Sequence[str], given: Mapping[str, str]) -> None:
    """Raises SandboxFailure ``command-too-large``."""
    sizes = [len(piece.encode(errors="surrogateescape")) + 1 for piece in (*arguments, *variables(given))]
    if max(sizes) >= MOST_PIECE_BYTES or sum(sizes) >= MOST_BYTES:
        raise bwrap.too_large()


def require(image: Image, program: str, what: str) -> None:
    """Raises SandboxFailure ``image-unfit`` for an image that has no such program."""
    if program not in image.programs:
        raise SandboxFailure(
            f"The image {image.id} has no {program}, which is needed for {what}.",
            hint=f"Choose an image that has {program} on its PATH.",
            kind="image-unfit",
            retryable=False,
        )


def not_put(ended: Ended) -> SandboxFailure:
    """The failure of files that did not get into a sandbox."""
    return SandboxFailure(
        f"Files could not be put into the sandbox: {ended.seen.stderr.text.strip()[-300:]}",
        hint="Is there room for them in `disk_bytes`?",
        kind="disk-full",
        retryable=False,
    )

"""Runs inside a container: puts files in place, then is the program.

* What it needs is read from standard input to the byte; what follows there is the program's own input.
* A Python program runs in this very interpreter, and sees nothing of this module.

It is given to the container's own Python as text, so it imports nothing but the standard library.

On standard input is a length of eight bytes, and as much JSON: ``files`` (by path below the folder that it runs in, as
base64), ``arguments``, and ``code`` for a Python program or null for another command.
"""

import base64
import json
import os
import sys
from types import TracebackType
from typing import Any


def exactly(count: int) -> bytes:
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            raise EOFError("standard input ended too early")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def put(files: dict[str, str]) -> None:
    for path, content in files.items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))


def without_own_frames(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename != "main.py":
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def become(request: dict[str, Any]) -> None:
    put(request["files"])
    arguments = request["arguments"]
    if request["code"] is None:
        try:
            os.execvp(arguments[0], arguments)
        except OSError as error:
            sys.stderr.write(f"{arguments[0]}: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(127)
    sys.argv = ["main.py", *arguments]
    sys.path.insert(0, os.getcwd())
    sys.excepthook = without_own_frames
    main = type(sys)("__main__")
    main.__dict__.update(__file__="main.py", __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(request["code"], "main.py", "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    become(json.loads(exactly(int.from_bytes(exactly(8), "big"))))

"""Runs inside a container: puts files in place, then is the program.

* A Python program runs in this very interpreter, and sees nothing of this module.
* Another command takes this process's place.
* What is left of standard input is the program's own.
"""

import base64
import json
import os
import sys
from types import TracebackType


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


def main() -> None:
    """The argument is JSON: ``files`` (base64 by path), ``arguments``, and ``code`` of a Python program or null."""
    request = json.loads(sys.argv[1])
    try:
        put(request["files"])
    except OSError as error:
        sys.stderr.write(f"files could not be put in place: {error}\n")
        sys.exit(126)
    arguments = request["arguments"]
    if request["code"] is None:
        try:
            os.execvp(arguments[0], arguments)
        except OSError as error:
            sys.stderr.write(f"{arguments[0]}: {error.strerror}\n")
            sys.exit(127)
    sys.argv = ["main.py", *arguments]
    sys.path.insert(0, os.getcwd())
    sys.excepthook = without_own_frames
    module = type(sys)("__main__")
    module.__dict__.update(__file__="main.py", __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(compile(request["code"], "main.py", "exec", dont_inherit=True), module.__dict__)

"""Runs inside a container: writes files, then becomes the program.

* A Python program runs in this interpreter, and cannot see this module.
* Another command replaces this process.
* The rest of standard input belongs to the program.
"""

import base64
import json
import os
import sys
from types import TracebackType


def write_files(files: dict[str, str]) -> None:
    for path, content in files.items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename != "main.py":
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def main() -> None:
    """Run the program in the argument, which is JSON: ``files`` (base64 by path), ``arguments``, and ``code`` of a
    Python program or null."""
    request = json.loads(sys.argv[1])
    try:
        write_files(request["files"])
    except OSError as error:
        sys.stderr.write(f"files could not be written: {error}\n")
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
    sys.excepthook = print_traceback
    module = type(sys)("__main__")
    module.__dict__.update(__file__="main.py", __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(compile(request["code"], "main.py", "exec", dont_inherit=True), module.__dict__)

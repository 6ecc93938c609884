"""Runs the program text in its first argument as the main module, in the current folder."""

import os
import sys

if sys.platform == "wasi":  # there it starts at the root
    os.chdir(os.environ["HOME"])
code = sys.argv[1]
sys.argv = ["main.py", *sys.argv[2:]]
sys.path.insert(0, os.getcwd())
main = sys.modules["__main__"] = type(sys)("__main__")
main.__dict__.update(__file__="main.py", __builtins__=__builtins__)
try:
    exec(compile(code, "main.py", "exec", dont_inherit=True), main.__dict__)
except SystemExit:
    raise
except BaseException as error:  # noqa: BLE001 - the program's own, shown as Python shows it
    trace = error.__traceback__
    own = error.with_traceback(trace and trace.tb_next)  # without the frame of this file
    sys.excepthook(type(own), own, own.__traceback__)
    sys.exit(1)

"""Sets the limits in its first argument (JSON, by name), and becomes the program in the other arguments."""

import contextlib
import json
import os
import resource
import signal
import sys

for name, value in json.loads(sys.argv[1]).items():
    with contextlib.suppress(ValueError, OSError):  # macOS defines some of them without supporting them
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (most, most))
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)  # as before this interpreter started
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[2]}: {error.strerror}\n")
    sys.exit(127)

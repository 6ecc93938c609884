"""G14: attempts of a program to break its own sandbox from a shell, and the outcome under each runtime.

``OUTCOMES`` has the outcomes by runtime: ``contained`` (the shell goes on), or ``lost`` (the result of the cell, or of
the next one, says ``lost``, and the session is recreated). The table in docs/sandbox.md shows the same.
"""

from __future__ import annotations

from typing import Literal

Outcome = Literal["contained", "lost"]

ATTEMPTS: dict[str, str] = {
    "kill everybody": "kill -9 -1",
    "remove everything": "rm -rf --no-preserve-root / 2>/dev/null",
    "take the shells away": "chmod 000 $(command -v bash) $(command -v sh)",
    "fill the disk": "dd if=/dev/zero of=$HOME/x bs=1M",
    "close the streams": "exec 0<&- 1>&- 2>&-",
    "leave no memory": "ulimit -v 1000",
    "stop the shell": "kill -STOP $$",
    "use up the files": "i=0; while [ $i -lt 300000 ]; do : >f$i || break; i=$((i+1)); done 2>/dev/null",
}

HARMLESS = "true"

AGAIN, TIMES = "echo ok", 8

OUTCOMES: dict[str, dict[str, Outcome]] = {
    "bubblewrap": dict.fromkeys(ATTEMPTS, "contained"),
    "docker": {**dict.fromkeys(ATTEMPTS, "contained"), "kill everybody": "lost"},
    "gvisor": dict.fromkeys(ATTEMPTS, "contained"),
}

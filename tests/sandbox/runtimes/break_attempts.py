"""G14: ways in which a program breaks its own sandbox from within a shell, and what each runtime makes of it.

A runtime is in ``OUTCOMES`` with what it does: ``contained`` (the shell goes on), ``lost`` (the result of the cell, or
of the next one, says ``lost``, and the session is made anew). The table in docs/sandbox.md is this one.
"""

from __future__ import annotations

from typing import Literal

Outcome = Literal["contained", "lost"]

WAYS: dict[str, str] = {
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
    "bubblewrap": dict.fromkeys(WAYS, "contained"),
    "docker": {**dict.fromkeys(WAYS, "contained"), "kill everybody": "lost"},
    "gvisor": dict.fromkeys(WAYS, "contained"),
}

"""Random programs from a small grammar of hostile things: the same seed gives the same program.

A program is a block; a block is a few statements; a statement forks a block, or does one thing to processes, memory,
files or descriptors. Programs are Python that runs inside a sandbox only.
"""

from __future__ import annotations

from random import Random

HEAD = "import ctypes, os, resource, signal, sys, threading, time\n"

MOST_DEPTH = 3

PLAIN = (
    "os.kill({target}, {signal})",
    "signal.signal({catchable}, signal.SIG_IGN)",
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    "held.append(bytearray({size}))",
    "os.write({descriptor}, b'x' * {size})",
    "open({name!r}, 'ab').write(bytes({size}))",
    "open('/dev/shm/' + {name!r}, 'ab').write(bytes({size}))",
    "[open(f'{{n}}', 'w') for n in range({count})]",
    "os.mkdir({name!r}); os.chdir({name!r})",
    "time.sleep({pause})",
    "os.close({descriptor})",
    "os.closerange(0, {count})",
    "os.dup2({descriptor}, {descriptor_too})",
    "os.execvp({program[0]!r}, {program!r})",
    "os.posix_spawnp({program[0]!r}, {program!r}, {{}})",
    "threading.Thread(target=time.sleep, args=({pause},)).start()",
    "os.setsid()",
    "os.setpgid(0, 0)",
    "os.wait()",
    "os.waitpid(-1, os.WNOHANG)",
    "os._exit({code})",
    "sys.exit({code})",
    "os.abort()",
    "ctypes.string_at(0)",
    "ctypes.CDLL(None).vfork()",
    "resource.setrlimit({rlimit}, ({count}, {count}))",
    "os.mkfifo({name!r}); open({name!r})",
    "os.sched_setaffinity(0, range(8))",
    "os.nice({count})",
    "sys.stdin.read()",
    "os.unlink({name!r})",
    "os.truncate({name!r}, {size})",
    "exec('while True: pass')",
)

PROGRAMS = (
    ["true"],
    ["sleep", "60"],
    ["sh", "-c", "kill -9 $$"],
    ["sh", "-c", "sleep 60 & sleep 60 & exec true"],
    ["sh", "-c", "trap '' TERM INT HUP; while :; do :; done"],
    ["yes"],
    ["cat"],
    ["no-such-program"],
)


def program(seed: int) -> str:
    """The program of a seed."""
    random = Random(seed)
    lines = [HEAD, "held = []", *_block(random, 0)]
    return "\n".join(lines) + "\n"


def _block(random: Random, depth: int) -> list[str]:
    return [line for _ in range(random.randint(1, 5)) for line in _statement(random, depth)]


def _statement(random: Random, depth: int) -> list[str]:
    kind = random.random()
    if kind < 0.25 and depth < MOST_DEPTH:
        return ["if os.fork() == 0:", *_indented(_block(random, depth + 1))]
    if kind < 0.32 and depth < MOST_DEPTH:
        return [f"for _ in range({random.choice((2, 5, 100))}):", *_indented(_block(random, depth + 1))]
    line = random.choice(PLAIN).format(
        target=random.choice(("0", "-1", "1", "os.getpid()", "os.getppid()", "2", "3")),
        signal=random.choice((1, 2, 9, 9, 10, 15, 17, 18, 19, 19, 20)),
        catchable=random.choice((1, 2, 13, 14, 15, 17, 18)),
        size=random.choice((1, 1000, 100_000, 5_000_000, 100_000_000)),
        descriptor=random.randint(0, 5),
        descriptor_too=random.randint(0, 5),
        name=random.choice("abc"),
        count=random.choice((0, 1, 5, 50, 400)),
        pause=random.choice((0, 0.01, 0.1, 60)),
        program=random.choice(PROGRAMS),
        code=random.choice((0, 1, 3, 127, 255)),
        rlimit=random.choice((0, 1, 3, 6, 7, 9)),
    )
    if random.random() < 0.6:  # otherwise an error ends the program
        return ["try:", f"    {line}", "except (OSError, ValueError, MemoryError):", "    pass"]
    return [line]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]

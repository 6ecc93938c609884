"""The long form runs all of its parts, and tells what came of each."""

from __future__ import annotations

import asyncio
import io
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.chaos import long_form
from tests.chaos.long_form import Part, run
from tests.e2e.processes import ROOT

WAIT = """
import pathlib, sys, time
made, awaited = map(pathlib.Path, sys.argv[1:])
made.touch()
deadline = time.monotonic() + 60
while not awaited.exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""
"""Makes one file and ends when another is there."""


def part(name: str, code: str, *arguments: object) -> Part:
    return Part(name, ("-c", code, *map(str, arguments)))


async def told(lanes: list[list[Part]], alone: list[Part]) -> tuple[int, str]:
    """Exit status, and what was printed."""
    output = io.StringIO()
    status = await run(lanes, alone, Console(file=output, width=100))
    return status, output.getvalue()


async def test_lanes_run_beside_each_other_and_the_rest_after_them(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    last = part("last", f"import os; assert sorted(os.listdir({str(tmp_path)!r})) == ['one', 'other']")
    status, output = await told([[part("left", WAIT, one, other)], [part("right", WAIT, other, one)]], [last])
    assert status == 0, output
    assert re.findall(r"│ (\w+) +│ \d+ +│ passed", output) == ["left", "right", "last"]
    assert re.search(r"all of it in \d+ s", output)


async def test_a_part_that_fails_is_shown_and_fails_the_whole_after_all_others_ran() -> None:
    failing = part("first", "print('what was wrong'); raise SystemExit(3)")
    status, output = await told([[failing, part("second", "print('fine')")]], [part("third", "pass")])
    assert status == 1
    assert "what was wrong" in output
    assert "fine" in output
    assert re.findall(r"│ (\w+) +│ \d+ +│ (\w[\w ]*\w)", output) == [
        ("first", "failed with 3"),
        ("second", "passed"),
        ("third", "passed"),
    ]


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN], ids=["heard", "ignored"])
async def test_a_part_is_interrupted_and_waited_for_when_the_whole_is(tmp_path: Path, inherited: Any) -> None:
    """Also where a shell started the whole in the background, so that it ignores the interruption itself."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    code = f"""
import pathlib, time
try:
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(60)
finally:
    pathlib.Path({str(ended)!r}).touch()
"""
    before = signal.signal(signal.SIGINT, inherited)
    try:
        await interrupted(code, begun)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.exists()


async def test_nothing_that_a_part_started_outlives_a_part_that_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_form, "END_S", 0.1)
    started = tmp_path / "started"
    code = f"""
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
made = pathlib.Path({str(started)!r} + ".new")
made.write_text(str(child.pid))
made.rename({str(started)!r})
time.sleep(60)
"""
    await interrupted(code, started)
    child = Path("/proc", started.read_text(), "stat")
    async with asyncio.timeout(30):
        while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
            await asyncio.sleep(0.01)


async def interrupted(code: str, begun: Path) -> None:
    """Interrupt the whole once its one part has made a file."""
    running = asyncio.create_task(told([[part("endless", code)]], []))
    async with asyncio.timeout(30):
        while not begun.exists():
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_each_part_is_a_module_or_a_file_of_tests_that_is_there() -> None:
    for one in (*(one for lane in long_form.LANES for one in lane), *long_form.ALONE):
        assert one.arguments[:2] == ("-m", "tests.chaos") or (ROOT / one.arguments[-1]).exists(), one.name

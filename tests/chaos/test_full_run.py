"""The full run runs all of its parts, and reports the result of each."""

from __future__ import annotations

import asyncio
import io
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.chaos import full_run
from tests.chaos.full_run import Part, run
from tests.e2e.processes import ROOT

WAIT = """
import pathlib, sys, time
own, other = map(pathlib.Path, sys.argv[1:])
own.touch()
deadline = time.monotonic() + 60
while not other.exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""
"""Makes one file and ends when another one exists."""


def part(name: str, code: str, *arguments: object) -> Part:
    return Part(name, ("-c", code, *map(str, arguments)))


async def run_captured(lanes: list[list[Part]], alone: list[Part]) -> tuple[int, str]:
    """Exit status and output."""
    output = io.StringIO()
    status = await run(lanes, alone, Console(file=output, width=100))
    return status, output.getvalue()


async def test_lanes_run_concurrently_and_the_other_parts_after_them(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    last = part("last", f"import os; assert sorted(os.listdir({str(tmp_path)!r})) == ['one', 'other']")
    status, output = await run_captured([[part("left", WAIT, one, other)], [part("right", WAIT, other, one)]], [last])
    assert status == 0, output
    assert re.findall(r"│ (\w+) +│ \d+ +│ passed", output) == ["left", "right", "last"]
    assert re.search(r"all parts in \d+ s", output)


async def test_a_part_that_fails_is_shown_and_fails_the_run_after_all_others() -> None:
    failing = part("first", "print('the reason'); raise SystemExit(3)")
    status, output = await run_captured([[failing, part("second", "print('fine')")]], [part("third", "pass")])
    assert status == 1
    assert "the reason" in output
    assert "fine" in output
    assert re.findall(r"│ (\w+) +│ \d+ +│ (\w[\w ]*\w)", output) == [
        ("first", "failed with 3"),
        ("second", "passed"),
        ("third", "passed"),
    ]


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN], ids=["handled", "ignored"])
async def test_a_part_is_interrupted_and_awaited_when_the_run_is_interrupted(tmp_path: Path, inherited: Any) -> None:
    """Also if a shell started the run in the background, so that it ignores SIGINT itself."""
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


async def test_no_child_outlives_a_part_that_ignores_the_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_run, "END_S", 0.1)
    started = tmp_path / "started"
    code = f"""
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
new = pathlib.Path({str(started)!r} + ".new")
new.write_text(str(child.pid))
new.rename({str(started)!r})
time.sleep(60)
"""
    await interrupted(code, started)
    child = Path("/proc", started.read_text(), "stat")
    async with asyncio.timeout(30):
        while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
            await asyncio.sleep(0.01)


async def interrupted(code: str, begun: Path) -> None:
    """Interrupt the run once its only part has made a file."""
    running = asyncio.create_task(run_captured([[part("endless", code)]], []))
    async with asyncio.timeout(30):
        while not begun.exists():
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_each_part_is_a_module_or_an_existing_file_of_tests() -> None:
    for one in (*(one for lane in full_run.LANES for one in lane), *full_run.ALONE):
        assert one.arguments[:2] == ("-m", "tests.chaos") or (ROOT / one.arguments[-1]).exists(), one.name

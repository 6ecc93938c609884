"""The project's set-up, locks and wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.check_tree import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
SEPARATE = {"vllm.txt", "uvicorn-floor.txt"}  # another environment, and deliberately the oldest version
EXTRAS = (
    "aiohttp",
    "google_crc32c",
    "starlette",
    "uvicorn",
    "uvloop",
    "click",
    "rich",
    "structlog",
    "prometheus_client",
)


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    listed = _run("make", "--no-print-directory", "help")
    assert re.findall(r"^  make ([\w-]+)", listed.stdout, re.MULTILINE) == phony.group(1).split()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_and_hashes_every_package_and_contains_no_address(lock: Path) -> None:
    text = lock.read_text(encoding="utf-8")
    entries = re.split(r"^(?=\S)", text.replace("\\\n", ""), flags=re.MULTILINE)
    entries = [entry for entry in entries if entry.strip()]
    assert entries
    for entry in entries:
        assert re.match(r"[a-z0-9][a-z0-9.\-]*==[^\s=]+", entry), entry.split()[0]
        assert "--hash=sha256:" in entry, entry.split()[0]
    assert not re.search(r"://|^-|@ ", text, re.MULTILINE)


def test_the_locks_agree_on_every_version() -> None:
    everything = _pins(ROOT / "requirements" / "all.txt")
    assert len(LOCKS) == 6
    for lock in (lock for lock in LOCKS if lock.name not in SEPARATE):
        pins = _pins(lock)
        shared = pins.keys() & everything.keys()
        assert shared
        assert {name: pins[name] for name in shared} == {name: everything[name] for name in shared}, lock.name


def test_the_locks_include_every_package_that_the_project_requires() -> None:
    required = _run(sys.executable, "-c", "import importlib.metadata as m; print(*m.requires('headrace'), sep='\\n')")
    names = {re.split(r"[\[><=; ]", line)[0].lower() for line in required.stdout.split("\n") if line} - {"headrace"}
    assert names
    assert names <= _pins(ROOT / "requirements" / "all.txt").keys()


def test_set_up_does_nothing_if_it_is_up_to_date(tmp_path: Path) -> None:
    _set_up_before(tmp_path)
    result = _set_up(tmp_path, {"python3": STATIC})
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_set_up_without_a_supported_python_prints_one_line(tmp_path: Path) -> None:
    result = _set_up(tmp_path, {"python3": STATIC}, PYTHON="/nonexistent/python")
    assert result.returncode == 1
    assert result.stderr == "setup: PYTHON=/nonexistent/python is not a Python 3.11 to 3.14.\n"


STATIC: dict[str, bool] = {}
SHARED = {"libpython": False}


@pytest.mark.parametrize(
    ("programs", "chosen"),
    [
        ({"python3": SHARED, "python3.12": STATIC}, "python3.12"),
        ({"python3": SHARED, "python3.12": SHARED, "usr/bin/python3": STATIC}, "usr/bin/python3"),
        ({"python3": SHARED, "usr/local/bin/python3": STATIC}, "usr/local/bin/python3"),
    ],
)
def test_set_up_chooses_a_faster_interpreter_than_the_first_and_says_so(
    tmp_path: Path, programs: dict[str, dict[str, bool]], chosen: str
) -> None:
    result = _set_up(tmp_path, programs)
    assert _chosen(tmp_path, result) == chosen
    (notice,) = (line for line in result.stderr.splitlines() if "a faster build" in line)
    assert notice.endswith(f"{chosen}, a faster build than python3; to use python3 instead: make setup PYTHON=python3")


@pytest.mark.parametrize(
    "other",
    [SHARED, {"version_info": False}, {"Python.h": False}, {"ensurepip": False}],
    ids=["none is faster", "not supported", "without headers", "cannot make a venv"],
)
def test_set_up_chooses_the_first_interpreter_if_no_faster_one_is_usable(
    tmp_path: Path, other: dict[str, bool]
) -> None:
    result = _set_up(tmp_path, {"python3": SHARED, "python3.12": other})
    assert _chosen(tmp_path, result) == "python3"
    assert "a faster build" not in result.stderr


def test_set_up_chooses_the_first_interpreter_if_it_is_a_faster_build(tmp_path: Path) -> None:
    result = _set_up(tmp_path, {"python3": {"Python.h": False}, "python3.12": STATIC})
    assert _chosen(tmp_path, result) == "python3"
    assert "a faster build" not in result.stderr


def test_set_up_chooses_a_faster_interpreter_without_a_venv_module_if_uv_is_installed(tmp_path: Path) -> None:
    result = _set_up(tmp_path, {"python3": SHARED, "python3.12": {"ensurepip": False}, "uv": {"--quiet": False}})
    assert "uv could not make .venv with python3.12." in result.stderr


def test_the_variable_python_alone_decides_which_interpreter_set_up_chooses(tmp_path: Path) -> None:
    programs = {"python3": SHARED, "python3.12": STATIC, "python3.13": SHARED}
    result = _set_up(tmp_path, programs, PYTHON="python3.13")
    assert _chosen(tmp_path, result) == "python3.13"
    assert "a faster build" not in result.stderr


def test_set_up_recreates_the_environment_when_python_names_another_interpreter(tmp_path: Path) -> None:
    _set_up_before(tmp_path)
    assert _set_up(tmp_path, {"python3": STATIC}, PYTHON=sys.executable).stderr == ""
    result = _set_up(tmp_path, {"python3": STATIC}, PYTHON="python3")
    assert _chosen(tmp_path, result) == "python3"
    assert not (tmp_path / ".venv").exists()


def test_set_up_for_a_changed_lock_keeps_the_interpreter_of_a_working_environment(tmp_path: Path) -> None:
    _set_up_before(tmp_path)
    (tmp_path / "requirements" / "new.txt").write_text("")
    result = _set_up(tmp_path, {"python3": STATIC, "uv": {"--quiet": False}})
    assert "setup: The locked packages could not be installed." in result.stderr
    assert (tmp_path / ".venv" / "bin" / "python").resolve() == Path(sys.executable).resolve()


def _checkout(tmp_path: Path) -> None:
    """Create the files that setup.sh reads; it looks below ``tmp_path`` in place of /usr."""
    for name in ("scripts/setup.sh", "requirements/dev.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    text = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    (tmp_path / "scripts" / "setup.sh").write_text(text.replace(" /usr/", f" {tmp_path}/usr/"))


def _set_up_before(tmp_path: Path) -> None:
    """Create an environment of this interpreter that is up to date."""
    _checkout(tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"VIRTUAL_ENV={tmp_path}/.venv\n")
    sums = "pwd; cksum requirements/*.txt pyproject.toml"
    result = subprocess.run(["sh", "-c", sums], cwd=tmp_path, capture_output=True, text=True, check=True)
    (tmp_path / ".venv" / ".headrace-setup").write_text(result.stdout)


def _set_up(
    tmp_path: Path, programs: dict[str, dict[str, bool]], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run setup.sh where only these programs exist. Each succeeds, except with the arguments that it maps to False.

    None of them can create an environment, so that set-up stops at that point and names the interpreter it chose.
    """
    _checkout(tmp_path)
    for name, successes in programs.items():
        program = tmp_path / (name if "/" in name else f"bin/{name}")
        program.parent.mkdir(parents=True, exist_ok=True)
        cases = "".join(
            f"*'{argument}'*) exit {int(not succeeds)} ;;\n"
            for argument, succeeds in {**successes, "-m venv": False}.items()
        )
        program.write_text(f'#!/bin/sh\ncase "$*" in\n*realpath*) echo "$0" ;;\n{cases}esac\n')
        program.chmod(0o755)
    for name in ("cat", "cksum", "dirname", "grep", "mkdir", "rm"):
        path = shutil.which(name)
        assert path is not None
        if not (tmp_path / "bin" / name).exists():
            (tmp_path / "bin" / name).symlink_to(path)
    return subprocess.run(
        ["/bin/sh", "scripts/setup.sh"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def _chosen(tmp_path: Path, result: subprocess.CompletedProcess[str]) -> str:
    """The interpreter that could not create an environment."""
    assert result.returncode == 1
    match = re.search(r"^setup: (\S+) cannot make a virtual environment", result.stderr, re.MULTILINE)
    assert match is not None, result.stderr
    return match[1].removeprefix(f"{tmp_path}/")


@pytest.mark.parametrize(
    ("ci", "status", "consequence"),
    [("false", 0, ["parts: tests and examples that need vLLM or torch are skipped"]), ("true", 1, [])],
)
def test_parts_without_the_python_of_vllm_print_a_message_and_fail_under_ci(
    tmp_path: Path, ci: str, status: int, consequence: list[str]
) -> None:
    result = _parts_of_vllm(tmp_path, CI=ci)
    assert (result.returncode, result.stderr.splitlines()[1:]) == (status, consequence)
    assert result.stderr.startswith("parts: vLLM is not installed: it needs Python 3.11. Install one (uv ")


def test_parts_of_vllm_check_the_free_disk_space_first(tmp_path: Path) -> None:
    (tmp_path / "df").write_text("#!/bin/sh\nprintf 'head\\ndisk 9 9 3145728 9 /\\n'\n")
    (tmp_path / "df").chmod(0o755)
    result = _parts_of_vllm(tmp_path, "printf /usr/bin/python3.11", CI="true")
    assert result.returncode == 1
    assert "it needs 6 GB" in result.stderr
    assert "has 3 GB free" in result.stderr
    assert not (tmp_path / "build" / "parts" / "vllm").exists()


def _parts_of_vllm(tmp_path: Path, find: str = "exit 2", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run parts_vllm.sh in an empty checkout. ``find`` is the command by which uv looks for Python."""
    for name, text in (("scripts/parts_vllm.sh", ""), ("requirements/vllm.txt", ""), ("pyproject.toml", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text or (ROOT / name).read_text(encoding="utf-8"))
    (tmp_path / "uv").write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ {find}; }}\n')
    (tmp_path / "uv").chmod(0o755)
    return subprocess.run(
        ["sh", "scripts/parts_vllm.sh"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_wheel_contains_code_types_templates_and_examples_and_nothing_else(tmp_path: Path) -> None:
    built = _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if not re.match(r"headrace-[^/]*\.dist-info/", name)}
    assert packages == {"headrace", "headrace_sandbox", "headrace_workers", "headrace_orchestrator"}
    assert {f"headrace_orchestrator/_examples/{name}" for name in ("learner.py", "guess_the_number.json")} <= set(names)
    assert any(re.fullmatch(r"headrace_orchestrator/console/.*\.html", name) for name in names)
    assert {f"headrace_orchestrator/console/static/{name}" for name in ("console.js", "console.css")} <= set(names)
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if re.search(r"tests?/|__pycache__|\.pyc$", name)]


@pytest.mark.parametrize("package", ["headrace", "headrace.client.sync_client"])
def test_the_contract_imports_without_any_extra(package: str) -> None:
    blocked = f"import sys\nfor name in {EXTRAS!r}: sys.modules[name] = None\nimport {package}\n"
    result = _run(sys.executable, "-c", blocked)
    assert result.returncode == 0, result.stderr


def test_the_help_of_the_command_line_lists_its_commands() -> None:
    result = _run(str(Path(sys.executable).with_name("headrace")), "--help")
    assert result.returncode == 0, result.stderr
    assert {"up", "demo", "run"} <= set(re.findall(r"^  (\w+)", result.stdout, re.MULTILINE))


def _pins(lock: Path) -> dict[str, set[str]]:
    pins: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9][a-z0-9.\-]*)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE):
        pins.setdefault(name, set()).add(version)
    return pins

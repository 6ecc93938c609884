"""The command line against a scripted server: JSON, exit codes and piped output."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import NothingToServe, RunExists, Unavailable, UnknownBatch, UnknownRun
from headrace.runspec import RunSpec
from headrace.wire import codec, messages
from headrace_orchestrator.cli import app, doctor, trajectories
from headrace_orchestrator.cli.app import cli
from headrace_orchestrator.cli.run import fields
from tests import builders
from tests.orchestrator.cli.conftest import Headrace
from tests.orchestrator.cli.statuses import run_status, service_status, waiting_run
from tests.sdk.client.stub_server import Reply, StubServer, ok, page, problem

COMMANDS = ["close", "demo", "doctor", "orchestrator", "run", "runs", "servers", "top", "trajectories", "up", "version"]


# Every command


def test_every_command_is_listed_and_its_help_has_an_example(headrace: Headrace) -> None:
    assert set(COMMANDS) <= set(cli.list_commands(None))  # type: ignore[arg-type]
    for name in COMMANDS:
        shown = headrace(name, "--help")
        assert shown.exit_code == 0
        assert f"headrace {name}" in shown.stdout.partition("Example")[2], name


def test_help_states_the_exit_codes(headrace: Headrace) -> None:
    shown = headrace("--help").stdout
    for line in ("0  ok", "1  it failed", "2  the command line", "3  the service is not reachable", "4  nothing came"):
        assert line in shown


def test_piped_output_has_no_escape_codes(headrace: Headrace, stub: StubServer) -> None:
    stub.on("GET /v1/runs", ok([waiting_run()]))
    stub.on("GET /v1/status", ok(service_status()))
    for arguments in (["runs"], ["top"], ["run", "--schema"], ["version"], ["doctor"]):
        shown = headrace(*arguments)
        assert "\x1b" not in shown.output
        assert "━" not in shown.output


def test_an_invalid_command_line_ends_with_2(headrace: Headrace) -> None:
    assert headrace("runs", "--nonsense").exit_code == 2
    assert headrace("nonsense").exit_code == 2
    assert headrace("run").exit_code == 2
    failed = headrace("runs", "--nonsense", "--json")
    assert (failed.exit_code, json.loads(failed.stderr)["code"]) == (2, "invalid-request")


def test_an_unreachable_service_ends_with_3(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_orchestrator.cli.output.CLI_RETRY_FOR_S", 0.0)
    failed = headrace("runs", "--url", "http://127.0.0.1:1")
    assert failed.exit_code == 3
    assert "cannot connect to http://127.0.0.1:1" in failed.stderr
    assert failed.stdout == ""


def test_a_command_without_a_result_in_time_ends_with_4(headrace: Headrace, stub: StubServer) -> None:
    stub.on("GET /v1/runs", problem(NothingToServe("No batch.")))
    assert headrace("runs").exit_code == 4


def test_an_error_is_its_message_and_hint_without_a_traceback(headrace: Headrace, stub: StubServer) -> None:
    stub.on("GET /v1/runs/gues/trajectories", problem(UnknownRun("No run 'gues'.", hint="Known: guess.")))
    failed = headrace("trajectories", "list", "gues")
    assert failed.exit_code == 1
    assert "No run 'gues'." in failed.stderr
    assert "Known: guess." in failed.stderr
    assert "Traceback" not in failed.stderr


def test_with_json_an_error_is_a_problem_on_standard_error(headrace: Headrace, stub: StubServer) -> None:
    stub.on("GET /v1/runs", page(500))
    failed = headrace("runs", "--json")
    body = json.loads(failed.stderr)
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert {"type", "title", "status", "code", "detail", "hint"} <= body.keys()


def test_an_unexpected_error_is_a_message_too_and_debug_shows_its_traceback(
    headrace: Headrace, stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("headrace_orchestrator.cli.runs.connect", explode)
    failed = headrace("runs")
    assert failed.exit_code == 1
    assert "ZeroDivisionError: division by zero" in failed.stderr
    assert isinstance(headrace("--debug", "runs").exception, ZeroDivisionError)


# Commands of other packages


def plugin(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint("plugged", value, app.PLUGINS)
    monkeypatch.setattr(app, "_plugins", lambda: {"plugged": point})


def test_commands_of_other_packages_mount_by_entry_point(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(monkeypatch, "headrace_orchestrator.cli.version:version")
    assert "plugged" in headrace("--help").stdout
    assert headrace("plugged", "--json").exit_code == 0


def test_a_command_whose_package_is_not_installed_says_so(headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(monkeypatch, "no_such_package_here.cli:command")
    assert "not installed" in headrace("--help").stdout
    failed = headrace("plugged", "--anything")
    assert failed.exit_code == 1
    assert "needs no_such_package_here" in failed.stderr


# version, runs, top


def test_version_names_release_and_schema(headrace: Headrace) -> None:
    assert set(json.loads(headrace("version", "--json").stdout)) == {"headrace", "schema", "python", "platform"}


def test_runs_are_a_table_of_tabs_when_piped(headrace: Headrace, stub: StubServer) -> None:
    stub.on("GET /v1/runs", ok([run_status(), waiting_run()]))
    lines = [line.split("\t") for line in headrace("runs").stdout.splitlines()]
    assert lines[0][:4] == ["run", "version", "learner", "waits on"]
    assert lines[1] == ["guess", "0.3", "training", "–", "7", "3", "4", "22", "1", "0.625"]
    assert lines[2][2:4] == ["waiting", "no-workers"]


def test_runs_as_json_are_the_statuses(headrace: Headrace, stub: StubServer) -> None:
    stub.on("GET /v1/runs", ok([run_status()]))
    (status,) = json.loads(headrace("runs", "--json").stdout)
    assert (status["name"], status["in_flight"]) == ("guess", 7)


SERVERS = messages.PolicyServersReply(
    epoch=1,
    revision=7,
    servers=[
        messages.PolicyServerStatus(address="http://a:1", state="serving", version="0.3", paused_s=61.0),
        messages.PolicyServerStatus(address="http://b:1", state="ejected", reason="nothing listens at this address"),
    ],
)


def test_servers_are_a_table_with_states_and_reasons(headrace: Headrace, stub: StubServer) -> None:
    stub.on("GET /v1/runs/guess/servers", ok(SERVERS))
    lines = [line.split("\t") for line in headrace("servers", "guess").stdout.splitlines()]
    assert lines[0][:4] == ["server", "state", "version", "paused"]
    assert lines[1][:4] == ["http://a:1", "serving", "0.3", "1.0 min"]
    assert (lines[2][1], lines[2][-1]) == ("ejected", "nothing listens at this address")
    assert json.loads(headrace("servers", "guess", "--json").stdout)["revision"] == 7


@pytest.mark.parametrize(
    ("state", "endpoints", "message"),
    [
        ("active", [], "each worker uses the one from its command line"),
        ("active", ["http://a:1"], "has no policy server now"),
        ("closed", ["http://a:1"], "is closed"),
    ],
)
def test_a_run_without_servers_gives_the_reason(
    headrace: Headrace, stub: StubServer, state: str, endpoints: list[str], message: str
) -> None:
    run = run_status(state=state, spec={"policy": {"endpoints": endpoints}})
    stub.on("GET /v1/runs/guess/servers", ok(messages.PolicyServersReply(epoch=1, revision=1 << 32)))
    stub.on("GET /v1/runs/guess", ok(run))
    assert message in headrace("servers", "guess").stderr


@pytest.mark.parametrize(("action", "route"), [("add", "POST {}"), ("drain", "POST {}/drain"), ("remove", "DELETE {}")])
def test_a_server_is_added_drained_and_removed(headrace: Headrace, stub: StubServer, action: str, route: str) -> None:
    request = route.format("/v1/runs/guess/servers")
    stub.on(request, ok({}))
    stub.on("GET /v1/runs/guess/servers", ok(SERVERS))
    assert headrace("servers", "guess", action, "http://a:1").exit_code == 0
    assert stub.requests_to(request)[0].json == {"address": "http://a:1"}
    assert headrace("servers", "guess", action).exit_code == 2


def test_without_runs_the_command_to_make_one_is_shown(headrace: Headrace, stub: StubServer) -> None:
    stub.on("GET /v1/runs", ok([]))
    assert "headrace run --help" in headrace("runs").stderr


def test_top_first_shows_whether_the_learner_waits_and_on_what(headrace: Headrace, stub: StubServer) -> None:
    stub.on("GET /v1/status", ok(service_status()))
    lines = headrace("top").stdout.splitlines()
    assert lines[0] == "guess: the learner waits. No worker of pool default is there."
    assert any(line.startswith("w1\tdefault\t8\t3") for line in lines)
    assert json.loads(headrace("top", "--json").stdout)["epoch"] == 2


# run


def test_a_run_is_made_from_a_file_and_from_flags_that_override_it(
    headrace: Headrace, stub: StubServer, tmp_path: Path
) -> None:
    stub.on("POST /v1/runs", ok(run_status(), status=201))
    toml = tmp_path / "spec.toml"
    toml.write_text('name = "guess"\nbatch_size = 8\n[[environments]]\nid = "game:A"\n[estimator]\nname = "grpo"\n')
    flags = ["--name", "mine", "--set", "estimator.gamma=0.9", "--set", "limits.max_turns=7", "--set", "pool=gpu"]
    made = headrace("run", str(toml), *flags, "--json")
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["name"] == "guess"
    assert stub.requests_to("POST /v1/runs")[0].json == {
        "name": "mine",
        "batch_size": 8,
        "environments": [{"id": "game:A"}],
        "estimator": {"name": "grpo", "gamma": 0.9},
        "limits": {"max_turns": 7},
        "pool": "gpu",
    }


def test_a_run_is_made_from_standard_input_or_flags_alone(headrace: Headrace, stub: StubServer) -> None:
    stub.on("POST /v1/runs", ok(run_status(), status=201))
    assert headrace("run", "-", input='{"name": "piped"}').exit_code == 0
    assert headrace("run", "--name", "flags", "--environment", "game:A", "--environment", "game:B").exit_code == 0
    piped, flags = (request.json for request in stub.requests_to("POST /v1/runs"))
    assert piped == {"name": "piped"}
    assert flags == {"name": "flags", "environments": [{"id": "game:A"}, {"id": "game:B"}]}


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "does not contain an object"), ('{"name": "a", "batch": 3}', "batch: Extra inputs")],
)
def test_an_invalid_spec_is_refused_with_its_field(
    headrace: Headrace, stub: StubServer, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "spec.json"
    file.write_text(text)
    failed = headrace("run", str(file))
    assert failed.exit_code == 1
    assert message in failed.stderr
    assert stub.requests == []


def test_a_missing_file_is_named(headrace: Headrace) -> None:
    failed = headrace("run", "nowhere.json")
    assert failed.exit_code == 1
    assert "nowhere.json cannot be read: No such file" in failed.stderr


def test_a_run_that_exists_ends_with_1(headrace: Headrace, stub: StubServer) -> None:
    stub.on("POST /v1/runs", problem(RunExists("A run 'guess' exists.")))
    assert headrace("run", "--name", "guess").exit_code == 1


def test_watching_ends_when_the_run_does(headrace: Headrace, stub: StubServer) -> None:
    stub.on("POST /v1/runs", ok(run_status(), status=201))
    stub.on("GET /v1/runs", ok([run_status(state="finished"), run_status(name="other")]))
    stub.on("GET /v1/runs/guess", ok(run_status(state="finished")))
    watched = headrace("run", "--name", "guess", "--watch")
    assert "guess: finished" in watched.stderr
    assert watched.stdout.splitlines()[1].split("\t")[2] == "finished"


def test_the_schema_has_every_field_with_type_default_and_meaning(headrace: Headrace) -> None:
    listed = {field.name: field for field in fields(RunSpec)}
    assert listed["estimator.gamma"].default == "1.0"
    assert "per *turn*" in listed["estimator.gamma"].meaning
    assert listed["environments[].id"].default == "(required)"
    assert listed["policy.agents.*.temperature"].type == "float | None"
    assert all(field.meaning for field in listed.values())
    assert len(headrace("run", "--schema").stdout.splitlines()) == len(listed) + 1
    assert "properties" in json.loads(headrace("run", "--schema", "--json").stdout)


# trajectories


def summary(number: int, **fields: Any) -> messages.TrajectorySummary:
    defaults: dict[str, Any] = {
        "id": builders.make_id(number),
        "run": "guess",
        "group": "g",
        "member": 0,
        "episode": "e",
        "attempt": 1,
        "environment": "env",
        "status": "finished",
        "stop_reason": "terminated",
        "reward": 1.0,
        "turns": 2,
        "row_tokens": 10,
        "size_bytes": 100,
        "low": "0.1",
        "high": "0.2",
    }
    return messages.TrajectorySummary(**{**defaults, **fields})


def test_trajectories_are_listed_up_to_the_limit(headrace: Headrace, stub: StubServer) -> None:
    listing = messages.TrajectoryList(epoch=1, trajectories=[summary(1), summary(2)], next="2")
    stub.on("GET /v1/runs/guess/trajectories", ok(listing))
    listed = headrace("trajectories", "list", "guess", "--limit", "3", "--status", "finished")
    assert len(listed.stdout.splitlines()) == 4
    assert "0.1…0.2" in listed.stdout
    assert [request.query.get("before") for request in stub.requests] == [None, "2"]
    shown = headrace("trajectories", "list", "guess", "--limit", "1", "--json")
    assert json.loads(shown.stdout)[0]["id"] == builders.make_id(1)


def test_a_transcript_has_reward_return_to_go_and_advantage_after_each_turn(
    headrace: Headrace, stub: StubServer
) -> None:
    stored = builders.make_trajectory(number=7, rewards=[0.0, 1.0])
    message = messages.TrajectoryAdvantages(
        epoch=1,
        trajectory=stored.id,
        batch="b-1",
        estimator="rebn",
        rows=[messages.SegmentAdvantages(segment=0, returns=[0.5, 1.0], advantages=[-1.25, 1.5])],
    )
    stub.on(f"GET /v1/trajectories/{stored.id}/advantages", ok(message))
    stub.on(f"GET /v1/trajectories/{stored.id}", Reply(200, codec.encode(stored), messages.RECORDS_MEDIA_TYPE))
    stub.on(f"GET /v1/runs/{stored.run}", ok(run_status()))
    shown = headrace("trajectories", "show", stored.id)
    assert shown.exit_code == 0, shown.stderr
    assert stored.id in shown.stdout
    assert "γ = 0.5 per turn" in shown.stdout
    assert "advantages by rebn in batch b-1" in shown.stdout
    assert "return-to-go 0.5, advantage -1.25" in shown.stdout
    data = json.loads(headrace("trajectories", "show", stored.id, "--json").stdout)
    assert data["gamma"] == 0.5
    assert "segments" not in data
    assert [turn["return_to_go"] for turn in data["turns"]] == [0.5, 1.0]
    assert [turn["advantage"] for turn in data["turns"]] == [-1.25, 1.5]


def test_a_transcript_of_a_trajectory_without_a_batch_has_no_advantages(headrace: Headrace, stub: StubServer) -> None:
    stored = builders.make_trajectory(number=7)
    stub.on(f"GET /v1/trajectories/{stored.id}", Reply(200, codec.encode(stored), messages.RECORDS_MEDIA_TYPE))
    stub.on(f"GET /v1/runs/{stored.run}", ok(run_status()))
    stub.on(f"GET /v1/trajectories/{stored.id}/advantages", problem(UnknownBatch("It is in none.")))
    shown = headrace("trajectories", "show", stored.id)
    assert "in no batch yet" in shown.stdout
    assert "advantage " not in shown.stdout


def test_returns_are_discounted_by_the_turns_of_each_agent_alone() -> None:
    played = builders.make_multi_agent()
    lines = trajectories.turn_lines(played, 0.5, None)
    for agent in {line.agent for line in lines.values()}:
        own = [line for line in lines.values() if line.agent == agent]
        for line, following in pairwise(own):
            assert line.return_to_go == line.turn.reward + 0.5 * following.return_to_go
        assert own[-1].return_to_go == own[-1].turn.reward


# doctor


def test_doctor_ends_with_1_if_a_check_failed_and_prints_a_remedy(
    headrace: Headrace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("headrace_orchestrator.cli.output.CLI_RETRY_FOR_S", 0.0)
    checked = headrace("doctor", "--data", str(tmp_path), "--url", "http://127.0.0.1:1", "--json")
    assert checked.exit_code == 1
    checks = {check["name"]: check for check in json.loads(checked.stdout)}
    assert checks["python"]["verdict"] == "ok"
    assert (checks["orchestrator"]["verdict"], checks["orchestrator"]["hint"]) == (
        "fail",
        "Start one with `headrace up`.",
    )


def test_doctor_shows_the_problem_of_an_orchestrator_that_cannot_store(
    headrace: Headrace, stub: StubServer, tmp_path: Path
) -> None:
    full = Unavailable("The store failed: No space left on device.", hint="Fix the cause.", phase="disk full")
    stub.on("GET /v1/status", problem(full))
    checked = headrace("doctor", "--data", str(tmp_path), "--port", stub.url.rpartition(":")[2])
    assert checked.exit_code == 1
    assert "fail\torchestrator\tThe store failed: No space left on device.\tFix the cause." in checked.stdout


def test_doctor_checks_the_orchestrator(headrace: Headrace, stub: StubServer, tmp_path: Path) -> None:
    stub.on("GET /v1/status", ok(service_status(workers=[])))
    checked = headrace("doctor", "--data", str(tmp_path), "--port", stub.url.rpartition(":")[2])
    lines = {line.split("\t")[1]: line for line in checked.stdout.splitlines()}
    assert checked.exit_code == 0
    assert lines["orchestrator"].startswith("ok\torchestrator\t0.0.1 at http://127.0.0.1")
    assert lines["port"].endswith("the orchestrator has it")
    assert lines["workers"].startswith("warn")
    assert lines["clock"].startswith("ok")


def test_doctor_prints_a_remedy_for_an_old_python_and_a_missing_extra() -> None:
    assert doctor.check_python((3, 10)).verdict == "fail"
    assert doctor.check_platform("darwin").verdict == "warn"
    assert doctor.check_extra("ray", ("no_such_module",)).hint == "pip install 'headrace[ray]'"


@pytest.mark.parametrize("assignment", ["=5", ".=5", "estimator.=1", "batch_size"])
def test_a_field_without_a_name_is_a_usage_error(headrace: Headrace, assignment: str) -> None:
    result = headrace("run", "--name", "x", "--set", assignment)
    assert result.exit_code == 2
    assert "FIELD=VALUE" in result.stderr

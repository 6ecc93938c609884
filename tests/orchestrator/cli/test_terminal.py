"""Output at a terminal: tables that fit, Ctrl-C as an ordinary end, transcripts that name every speaker."""

from __future__ import annotations

import io

import click
import msgspec
import pytest
from rich.console import Console

from headrace.client.sync_client import Client
from headrace.errors import UnknownBatch, UnknownRun
from headrace.trajectory import ContentPart, Message, Task
from headrace.wire import codec
from headrace.wire import messages as wire
from headrace_orchestrator.cli import runs, top, trajectories
from headrace_orchestrator.cli.output import fitting, rich_table
from tests import builders
from tests.orchestrator.cli.conftest import Headrace
from tests.orchestrator.cli.statuses import run_status, service_status
from tests.sdk.client.stub_server import Reply, StubServer, ok, problem


def drawn(columns: tuple[str, ...], rows: list[list[str]], width: int) -> str:
    terminal = Console(file=io.StringIO(), width=width, force_terminal=False)
    terminal.print(rich_table(columns, rows))
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


def test_an_id_is_never_broken_over_lines() -> None:
    name = builders.make_id(1)
    assert name in drawn(("id", "environment", "stop"), [[name, "game:GuessTheNumber-v0-hard", "terminated"]], 60)


def test_a_narrow_terminal_drops_spare_columns() -> None:
    columns, rows = ("id", "tokens", "status"), [["abc", "12", "finished"]]
    assert fitting(columns, rows, ("tokens", "status"), 40) == (columns, rows)
    assert fitting(columns, rows, ("tokens", "status"), 14) == (["id", "status"], [["abc", "finished"]])
    assert fitting(columns, rows, ("tokens", "status"), 4) == (["id"], [["abc"]])


def test_an_error_prints_its_message_and_its_hint_once(headrace: Headrace, stub: StubServer) -> None:
    stub.on("GET /v1/runs/gues/trajectories", problem(UnknownRun("There is no run named 'gues'.", hint="Look.")))
    failed = headrace("trajectories", "list", "gues")
    assert failed.stderr == "Error: There is no run named 'gues'.\nLook.\n"


# close


def test_close_ends_a_run_and_prints_its_state(headrace: Headrace, stub: StubServer) -> None:
    stub.on("POST /v1/runs/guess/close", ok(run_status(state="closed")))
    stub.on("GET /v1/runs/guess", ok(run_status(state="closed")))
    closed = headrace("close", "guess")
    assert (closed.exit_code, closed.stdout, closed.stderr) == (0, "", "The run guess is closed.\n")
    assert msgspec.json.decode(headrace("close", "guess", "--json").stdout)["state"] == "closed"
    assert len(stub.requests_to("POST /v1/runs/guess/close")) == 2


# runs and top


@pytest.mark.parametrize("code", ["policy-failing", "workers-lost", "policy-outdated", "no-rows", "prompts-differ"])
def test_problems_are_shown_even_while_no_learner_waits(headrace: Headrace, stub: StubServer, code: str) -> None:
    run = run_status(reasons=[wire.Reason(code=code, message="Something is wrong.")])
    stub.on("GET /v1/runs", ok([run]))
    assert "guess: Something is wrong." in headrace("runs").stderr
    assert "Something is wrong" in top.verdict(run)


def test_a_silent_worker_is_told_from_those_that_are_there() -> None:
    (worker,) = service_status().workers
    assert top.worker_row(worker)[-1] == "ok"
    assert top.worker_row(msgspec.structs.replace(worker, silent=True))[-1] == "silent"


def test_a_learner_that_is_silent_or_gone_is_not_said_to_train() -> None:
    assert runs.learner_state(run_status(learner_doing_s=299.0)) == "training"
    silent = run_status(learner_silent=True, learner_heard_s=40.0, learner_holds=1)
    assert runs.learner_state(silent) == "silent"
    assert top.verdict(silent) == "guess: the learner is silent (40 s, holding 1)"
    gone = run_status(learner_doing="gone", learner_doing_s=5.0, learner_silent=True)
    assert runs.learner_state(gone) == "gone"
    assert runs.learner_state(run_status(learner_silent=True, learner_waiting=True)) == "waiting"


def test_ctrl_c_ends_a_live_view_without_an_error(
    headrace: Headrace, stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(client: Client) -> list[wire.RunStatus]:
        raise KeyboardInterrupt

    stub.on("POST /v1/runs", ok(run_status(), status=201))
    stub.on("GET /v1/runs/guess", ok(run_status()))
    monkeypatch.setattr(Client, "runs", interrupted)
    watched = headrace("run", "--name", "guess", "--watch")
    assert watched.exit_code == 0
    assert "Aborted" not in watched.output
    assert watched.stdout.splitlines()[1].startswith("guess\t")


# transcripts


def test_a_transcript_names_images_and_their_text() -> None:
    parts = [ContentPart(type="text", text="Look:"), ContentPart(type="image", asset="ab" * 32, text="<board>")]
    lines = trajectories.transcript(builders.make_trajectory(messages=[Message(role="user", content=parts)]), 1.0, None)
    assert f"Look:\n<image {'ab' * 32}> as text: <board>" in list(lines)


def test_text_from_a_model_cannot_control_a_terminal(headrace: Headrace, stub: StubServer) -> None:
    text = "\x1b]0;owned\x07\x1b[2J\tA\u202eB\r"
    stored = builders.make_trajectory(messages=[Message(role="assistant", content=text)])
    stub.on(f"GET /v1/trajectories/{stored.id}", Reply(200, codec.encode(stored), wire.RECORDS_MEDIA_TYPE))
    stub.on(f"GET /v1/runs/{stored.run}", ok(run_status()))
    stub.on(f"GET /v1/trajectories/{stored.id}/advantages", problem(UnknownBatch(text)))
    shown = headrace("trajectories", "show", stored.id).stdout
    assert r"\x1b]0;owned\x07\x1b[2J" in shown
    assert r"A\u202eB\x0d" in shown
    failing = wire.Reason(code="policy-failing", message=text)
    stub.on("GET /v1/runs", ok([run_status(learner_waiting=True, reasons=[failing])]))
    stub.on("GET /v1/status", ok(service_status(runs=[run_status(learner_waiting=True, reasons=[failing])])))
    stub.on("GET /v1/runs/guess", problem(UnknownRun(text)))
    for command in (["runs"], ["top"], ["close", "guess"], ["servers", "guess"]):
        assert "\x1b" not in headrace(*command).output


def test_a_transcript_of_several_agents_names_the_recipient_of_a_message() -> None:
    messages = [
        Message(role="user", content="Your move.", agent="player"),
        Message(role="assistant", content="", agent="player", turn=0),
    ]
    several = builders.make_multi_agent(messages=messages)
    assert click.style("user to player", bold=True) in list(trajectories.transcript(several, 1.0, None))
    alone = builders.make_trajectory(messages=messages)
    assert click.style("user", bold=True) in list(trajectories.transcript(alone, 1.0, None))


def test_g11_a_transcript_shows_sampled_ids_and_text_if_the_environment_got_only_a_part() -> None:
    played = builders.make_trajectory()
    (segment,) = played.segments
    turns = [msgspec.structs.replace(segment.turns[0], said="hello</a>\nX [b]")]
    cut = msgspec.structs.replace(played, segments=[msgspec.structs.replace(segment, turns=turns)])
    ids = segment.token_ids[turns[0].start : turns[0].end].tolist()
    shown = f"sampled 4 tokens: {' '.join(map(str, ids))}\nas text: 'hello</a>\\nX [b]'"
    assert click.style(shown, fg="yellow") in list(trajectories.transcript(cut, 1.0, None))
    assert not any("as text: " in line for line in trajectories.transcript(played, 1.0, None))


def test_an_empty_action_is_shown_explicitly() -> None:
    messages = [Message(role="assistant", content="", turn=0)]
    lines = list(trajectories.transcript(builders.make_trajectory(messages=messages), 1.0, None))
    assert click.style("(nothing)", dim=True) in lines


def test_a_transcript_says_how_many_control_tokens_the_environment_spelled() -> None:
    forged, plain = (builders.make_trajectory(control_tokens=count) for count in (2, 0))
    shown = "Texts of the environment spelled 2 control tokens of the model; they were encoded as text."
    assert click.style(shown, fg="yellow") in list(trajectories.transcript(forged, 1.0, None))
    assert not any("control token" in line for line in trajectories.transcript(plain, 1.0, None))


def test_a_name_with_line_ends_does_not_split_a_row_of_a_listing(headrace: Headrace, stub: StubServer) -> None:
    name = "a\nb\tc\u2028d\x85e"
    stub.on("GET /v1/runs", ok([run_status(name=name)]))
    stub.on("GET /v1/status", ok(service_status(runs=[run_status(name=name)])))
    for command in (["runs"], ["top"]):
        lines = headrace(*command).stdout.splitlines()
        assert [line for line in lines if line.startswith(r"a\nb\tc\u2028d\x85e")], command
    task = Task(environment=name, seed=1)
    stored = builders.make_trajectory(task=task)
    assert r"a\nb\tc\u2028d\x85e, seed 1" in next(trajectories.transcript(stored, 1.0, None))

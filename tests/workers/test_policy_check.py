"""``headrace policy check``: a server that keeps the protocol passes, and each fault is named by its check."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.errors import SetupError
from headrace_workers.policy_check import distribution_checks, stop_checks
from headrace_workers.policy_check.cli import check_server, policy
from headrace_workers.policy_check.findings import CheckFinding
from headrace_workers.renderers.folder_tokenizer import load_tokenizer
from tests.workers.models import CHATML, STRIPS_THINKING, make_model
from tests.workers.token_server import TokenServer, serving_tokens

ANSWERS = distribution_checks.ANSWERS


async def findings_of(
    folder: Path, *, wrong: str = "", served: Path | None = None, renderer: str = "template"
) -> dict[str, CheckFinding]:
    """Check a server of the model in ``served`` (or ``folder``); return the findings by name."""
    asked = {"model": "policy", "renderer": renderer, "tokenizer": str(folder)}
    async with serving_tokens(TokenServer(load_tokenizer(str(served or folder)), wrong)) as server:
        findings = await check_server(server.url, asked, tolerance=0.01, timeout_s=10.0)
    return {finding.check: finding for finding in findings}


@pytest.fixture(autouse=True)
def few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistical probe needs most of a check's time, and few tests are about it."""
    monkeypatch.setattr(distribution_checks, "ANSWERS", 32)


@pytest.fixture
def all_answers(few_answers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution_checks, "ANSWERS", ANSWERS)


def failed(findings: dict[str, CheckFinding]) -> list[str]:
    return [name for name, finding in findings.items() if finding.status == "FAIL"]


async def test_a_server_that_keeps_the_protocol_passes_every_check(tmp_path: Path) -> None:
    findings = await findings_of(make_model(tmp_path))
    assert findings.pop("image").status == "SKIPPED"  # its model reads text only
    assert {name: finding.status for name, finding in findings.items()} == dict.fromkeys(findings, "PASS")
    assert findings["turns"].detail == "two turns in one segment"
    assert "0.3" in findings["version"].detail


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        ("model", "model"),
        ("fewer ids", "vocabulary"),
        ("no ids", "ids"),
        ("echo", "ids"),
        ("logprobs", "logprobs"),
        ("scores", "scores"),
        ("greedy", "greedy"),
        ("seed", "seeds"),
        ("n", "several"),
        ("stop token", "stop token"),
        ("stop string", "stop string"),
        ("truncates", "context"),
        ("version", "version"),
        ("abort", "abort"),
    ],
)
async def test_each_fault_of_a_server_is_named_by_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, check: str
) -> None:
    monkeypatch.setattr(stop_checks, "ABORT_POLLS", 2)
    findings = await findings_of(make_model(tmp_path), wrong=wrong)
    assert failed(findings)[0] == check
    assert findings[check].remedy


FILTERS = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}


@pytest.mark.usefixtures("all_answers")
async def test_sampling_defaults_of_the_models_folder_do_not_apply_because_requests_state_all_parameters(
    tmp_path: Path,
) -> None:
    folder = make_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(FILTERS))
    found = (await findings_of(folder))["sampling"]
    assert found.status == "PASS"
    assert "generation_config.json (temperature 0.5, top_p 0.9, top_k 3) does not apply" in found.detail


@pytest.mark.usefixtures("all_answers")
@pytest.mark.parametrize("defaults", [{"temperature": 0.5}, {"top_p": 0.94}, {"top_k": 3}, FILTERS])
async def test_a_server_that_replaces_sampling_parameters_is_named_by_a_statistical_probe(
    tmp_path: Path, defaults: dict[str, float]
) -> None:
    folder = make_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    found = (await findings_of(folder, wrong="overrides"))["sampling"]
    assert (found.status, "was requested, but not used" in found.detail) == ("FAIL", True)
    assert f"generation_config.json ({', '.join(f'{k} {v}' for k, v in defaults.items())})" in found.remedy


async def test_a_check_of_a_missing_feature_is_skipped(tmp_path: Path) -> None:
    findings = await findings_of(make_model(tmp_path), wrong="unscored")
    assert findings["scores"] == CheckFinding("scores", "SKIPPED", "the server returns no prompt_logprobs")
    assert failed(findings) == []


async def test_a_server_that_lists_no_models_does_not_fail_the_check_of_the_model(tmp_path: Path) -> None:
    findings = await findings_of(make_model(tmp_path), wrong="unnamed")
    assert findings["model"] == CheckFinding("model", "SKIPPED", "/v1/models lists no model")
    assert findings["ids"].status == "PASS"


async def test_a_tokenizer_of_another_model_is_detected(tmp_path: Path) -> None:
    other = make_model(tmp_path / "other")
    definition = json.loads((other / "tokenizer.json").read_text())
    vocab = definition["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(definition))
    findings = await findings_of(make_model(tmp_path / "one"), served=other)
    assert failed(findings)[0] == "vocabulary"
    assert "to the tokenizer, but [" in findings["vocabulary"].detail


async def test_a_larger_model_than_the_tokenizers_is_detected(tmp_path: Path) -> None:
    larger = make_model(tmp_path / "larger")
    (larger / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    findings = await findings_of(make_model(tmp_path / "one"), served=larger)
    assert "the server knows id 423; the tokenizer has 423 ids" in findings["vocabulary"].detail


async def test_another_template_is_detected_with_the_place_where_it_differs(tmp_path: Path) -> None:
    findings = await findings_of(
        make_model(tmp_path / "one", STRIPS_THINKING), served=make_model(tmp_path / "other", CHATML)
    )
    assert failed(findings) == ["template"]
    assert "'<think>\\n' here, '' at the server" in findings["template"].detail


async def test_a_template_that_rewrites_turns_is_reported(tmp_path: Path) -> None:
    numbered = CHATML.replace("m.role", "loop.revindex | string + m.role")
    findings = await findings_of(make_model(tmp_path, numbered))
    assert findings["turns"].status == "PASS"
    assert "two turns in two segments" in findings["turns"].detail


async def test_a_template_that_drops_the_policys_answers_is_detected(tmp_path: Path) -> None:
    drops = CHATML.replace("for m in messages", "for m in messages if m.role != 'assistant'")
    findings = await findings_of(make_model(tmp_path, drops))
    assert failed(findings)[0] == "roles"
    assert "no message of role 'assistant': message-not-shown" in findings["roles"].detail


async def test_a_template_that_reads_parts_passes_and_a_role_that_it_drops_is_named(tmp_path: Path) -> None:
    content = "{%- for part in m.content %}{%- if part.type == 'text' %}{{ part.text }}{%- endif %}{%- endfor %}"
    parts = CHATML.replace("for m in messages", "for m in messages if m.role != 'tool'").replace(
        "m.content + '<|im_end|>", "'' }}" + content + "{{ '<|im_end|>"
    )
    findings = await findings_of(make_model(tmp_path, parts))
    assert failed(findings) == []
    assert findings["roles"].detail.startswith("the prompt shows messages of user, assistant, system; not tool: ")


async def test_control_tokens_of_a_message_are_text_and_the_servers_own_route_is_told_apart(tmp_path: Path) -> None:
    findings = await findings_of(make_model(tmp_path))
    detail = "a message that spells 2 control tokens adds none to the prompt"
    assert findings["control tokens"].detail == detail
    findings = await findings_of(make_model(tmp_path), wrong="forges")
    assert (
        findings["control tokens"].detail == f"{detail}; at the server's chat route it would (policy.protocol 'chat')"
    )


@pytest.fixture(scope="module")
def tiny_policy() -> Iterator[str]:
    command = [sys.executable, "-m", "headrace_workers.tiny_policy", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["address"]
    process.terminate()
    process.wait(timeout=20)
    process.stdout.close()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(policy, ["check", *arguments])


def test_the_tiny_policy_passes_and_the_command_says_so(tiny_policy: str) -> None:
    result = run("--endpoint", tiny_policy)
    assert result.exit_code == 0
    assert "PASS    ids" in result.output
    assert result.output.endswith("Renderer and server agree.\n")


def test_a_failed_check_ends_with_1_and_json_is_for_scripts(tiny_policy: str) -> None:
    result = run("--endpoint", tiny_policy, "--model", "nobody", "--json")
    assert result.exit_code == 1
    findings = {item["check"]: item for item in json.loads(result.output)}
    assert findings["model"]["status"] == "FAIL"
    assert findings["ids"]["detail"] == "it needs the check 'model'"


def test_a_server_that_cannot_be_reached_is_a_failed_check() -> None:
    result = run("--endpoint", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "FAIL    server" in result.output
    assert "Check that the server is running" in result.output


def test_a_missing_tokenizer_is_an_error_of_the_command(tmp_path: Path) -> None:
    result = run("--endpoint", "http://127.0.0.1:9", "--tokenizer", str(tmp_path / "none"))
    assert isinstance(result.exception, SetupError)
    assert "does not exist on this worker" in str(result.exception)

"""``headrace policy check``: a test that a live policy server, a renderer and a tokenizer agree."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import click

from headrace.errors import EpisodeFailure, MissingExtra, SetupError
from headrace.runspec import parse_run_spec
from headrace.wire.policy_server import base_url
from headrace_workers.policies import ServedPolicies
from headrace_workers.policy_check import CHECKS, CheckedServer, CheckFinding, CheckTarget, run_checks
from headrace_workers.renderers import make_renderer

COLOURS = {"PASS": "green", "FAIL": "red", "SKIPPED": "yellow"}


@click.group("policy", short_help="Check that a policy server, a renderer and a tokenizer agree.")
def policy() -> None:
    """Inspect policy servers."""


@policy.command("check")
@click.option("--endpoint", required=True, metavar="URL", help="Address of the policy server.")
@click.option("--model", default="policy", show_default=True, help="Model name in requests.")
@click.option("--tokenizer", default="", metavar="FOLDER|NAME", help="The model's folder, or its name on the hub.")
@click.option("--renderer", help="As policy.renderer of a run spec.  [default: auto; bytes without --tokenizer]")
@click.option("--renderer-options", default="{}", metavar="JSON", help="As policy.renderer_options of a run spec.")
@click.option(
    "--tolerance", default=0.1, show_default=True, help="Largest difference of a token's two log-probabilities."
)
@click.option("--timeout-s", default=120.0, show_default=True, help="Deadline of each request, in seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@click.pass_context
def check(
    context: click.Context,
    *,
    endpoint: str,
    model: str,
    tokenizer: str,
    renderer: str | None,
    renderer_options: str,
    tolerance: float,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Check on a live server that rendering, token ids and log-probabilities agree.

    The checks sample a few short answers and change nothing. The exit code is 1 if a check fails.

    \b
    Examples:
      headrace policy check --endpoint http://127.0.0.1:8471
      headrace policy check --endpoint http://gpu1:8000 --model Qwen/Qwen3-8B --tokenizer Qwen/Qwen3-8B
    """
    policy = {
        "model": model,
        "renderer": renderer or ("auto" if tokenizer else "bytes"),
        "tokenizer": tokenizer,
        "renderer_options": _parse_options(renderer_options),
    }

    def show(finding: CheckFinding) -> None:
        if not as_json:
            _print(finding)

    findings = asyncio.run(check_server(endpoint, policy, tolerance=tolerance, timeout_s=timeout_s, show=show))
    failed = sum(finding.status == "FAIL" for finding in findings)
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], ensure_ascii=False))
    elif failed:
        click.echo(f"{failed} of {len(findings)} checks fail.")
    else:
        click.echo("Renderer and server agree.")
    context.exit(1 if failed else 0)


def _parse_options(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise click.UsageError(f"--renderer-options is not JSON: {error}.") from error


def _print(finding: CheckFinding) -> None:
    status = click.style(f"{finding.status:8}", fg=COLOURS[finding.status])
    click.echo(f"{status}{finding.check:13}{finding.detail}")
    if finding.remedy:
        click.echo(f"{'':21}{finding.remedy}")


async def check_server(
    endpoint: str,
    policy: dict[str, Any],
    *,
    tolerance: float,
    timeout_s: float,
    show: Callable[[CheckFinding], None] = lambda finding: None,
) -> list[CheckFinding]:
    """Check a server and return all findings. ``policy`` has fields of a run spec's policy; ``show`` is called with
    each finding at once. Raises SetupError if the renderer cannot be created."""
    findings = []
    async with _target(base_url(endpoint), policy, tolerance, timeout_s) as subject:
        async for finding in run_checks(CHECKS, subject):
            show(finding)
            findings.append(finding)
    return findings


@asynccontextmanager
async def _target(
    endpoint: str, policy: dict[str, Any], tolerance: float, timeout_s: float
) -> AsyncIterator[CheckTarget]:
    spec = parse_run_spec({"name": "check", "policy": policy}).policy
    try:
        renderer = make_renderer(spec)
        encode, decode, sampling_defaults = _reader(spec.tokenizer)
    except EpisodeFailure as failure:
        kind = MissingExtra if failure.kind == "missing-extra" else SetupError
        raise kind(failure.detail, hint=failure.hint) from failure
    policies = ServedPolicies(default_endpoints=[endpoint], clock=time.monotonic)
    async with aiohttp.ClientSession(trust_env=False) as session:
        server = CheckedServer(session, endpoint, spec.model, timeout_s)
        try:
            yield CheckTarget(
                server=server,
                renderer=renderer,
                encode=encode,
                decode=decode,
                policies=policies,
                tolerance=tolerance,
                sampling_defaults=sampling_defaults,
            )
        finally:
            await policies.close()


class _Reader(NamedTuple):
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    sampling_defaults: dict[str, object]


def _reader(tokenizer: str) -> _Reader:
    """The functions that encode and decode text, and the model's sampling defaults; bytes without a tokenizer."""
    if not tokenizer:
        return _Reader(
            lambda text: list(text.encode()), lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"), {}
        )
    from headrace_workers.renderers.folder_tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    return _Reader(loaded.encode, loaded.decode, loaded.sampling_defaults)

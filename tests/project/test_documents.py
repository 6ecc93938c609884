"""Links, Python examples and make targets in the documents are valid."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import PolicyFailure
from headrace.trajectory import Sampling
from headrace_orchestrator.cli.processes.components import free_port
from headrace_workers.policies import ServedPolicies
from headrace_workers.policies.base import Policy, Sample, SampleRequest
from scripts.check_tree import ROOT, files

DOCUMENTS = [path for path in files() if path.suffix == ".md"]

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _anchors(document: Path) -> set[str]:
    """The anchors that a renderer makes of a document's headings."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_every_link_to_a_file_or_heading_has_a_target(document: Path) -> None:
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    broken = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue  # another site
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_every_python_example_compiles(document: Path) -> None:
    for language, code in FENCE.findall(document.read_text(encoding="utf-8")):
        if language == "python":
            compile(code, _id(document), "exec")


@pytest.mark.parametrize("document", DOCUMENTS, ids=_id)
def test_every_make_target_that_a_document_names_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = re.findall(r"(?:`|^\s*|&& )make ([a-z-]+)\b", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= targets


async def test_the_policy_server_in_the_documents_serves_a_worker() -> None:
    text = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    (code,) = [code for language, code in FENCE.findall(text) if language == "python" and "HTTPServer" in code]
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", code.replace("8000", str(port))], stderr=subprocess.DEVNULL)
    policies = ServedPolicies(default_endpoints=[f"http://127.0.0.1:{port}"], clock=time.monotonic)
    try:
        sample = await sampled(policies.at([]))
    finally:
        await policies.close()
        process.kill()
        process.wait()
    assert bytes(sample.token_ids) == b"ok"
    assert [str(run.version) for run in sample.versions] == ["0.0"]


async def sampled(policy: Policy) -> Sample:
    """A sample, requested until the server responds."""
    request = SampleRequest(
        group="g",
        episode="e",
        id="e-1-0",
        model="policy",
        prompt=[1, 2],
        sampling=Sampling(temperature=1.0, top_p=1.0, seed=1),
        max_tokens=8,
        stop=[],
        stop_token_ids=[],
        timeout_s=10.0,
        vocab_size=256,
    )
    for _ in range(100):
        try:
            return await policy.sample(request)
        except PolicyFailure as error:
            if error.kind != "connection-refused":
                raise
            await asyncio.sleep(0.05)
    raise AssertionError("the server did not start")


def test_the_list_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = (folder / "README.md").read_text(encoding="utf-8")
    pages = sorted(path.name for path in folder.glob("0*.md"))
    assert [name for name in pages if f"({name})" not in listed] == []
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))

"""The console, in a browser and without scripts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from headrace.errors import LAYERS
from headrace.wire import messages
from headrace_orchestrator.console import render
from headrace_orchestrator.service.lifecycle import ServicePhase
from tests.orchestrator.console.browser import chromium
from tests.orchestrator.serving import Api, refusing_disk, until

RUN = messages.RunStatus(
    name="run",
    state="active",
    version="0.3",
    spec={},
    groups=messages.GroupCounts(),
    credit=1,
    in_flight=1,
    queued=0,
    leased=0,
    episodes={},
    batches_acked=0,
    batches_open=0,
    learner_doing="",
    learner_doing_s=-1.0,
    learner_waiting=False,
    reasons=[],
)


def run(**fields: Any) -> messages.RunStatus:
    return msgspec.structs.replace(RUN, **fields)


def service(*runs: messages.RunStatus) -> messages.ServiceStatus:
    return messages.ServiceStatus(epoch=1, version="0.0.1", uptime_s=5.0, runs=list(runs), workers=[], store={})


def test_the_page_begins_with_whether_the_learner_waits_and_on_what():
    reason = messages.Reason(code="no-workers", message="No workers in pool gpu.")
    waiting = render.headline(run(learner_waiting=True, reasons=[reason]))
    assert waiting.sentence == "The learner is waiting for workers."
    assert waiting.details == ["No workers in pool gpu."]
    busy = render.headline(run(learner_doing="training", learner_doing_s=30.0))
    assert busy.sentence == "The learner is not waiting: it has been training for 30 s."
    assert render.headline(run()).sentence == "No learner has pulled from this run yet."
    assert "finished" in render.headline(run(state="finished")).sentence
    assert "holds a batch" in render.headline(run(batches_open=1)).sentence


def test_every_reason_code_has_a_text():
    codes = re.search(r"``code`` is one of: ([^.]*)", messages.Reason.__doc__ or "")
    assert codes is not None
    for code in [*codes.group(1).replace("\n", " ").split(","), *(f"{layer}-failing" for layer in LAYERS)]:
        reason = messages.Reason(code=code.strip(), message="x")
        sentence = render.headline(run(learner_waiting=True, reasons=[reason])).sentence
        assert f"waiting for {code.strip()}." not in sentence, f"{code.strip()} has no text"


def test_active_runs_come_first_and_of_them_those_with_a_waiting_learner():
    reason = messages.Reason(code="collecting", message="1 of 2 groups ready.")
    status = service(
        run(name="old", state="closed"),
        run(name="live"),
        run(name="busy", learner_doing="training"),
        run(name="hungry", learner_waiting=True, reasons=[reason]),
    )
    content = render.content(status, ServicePhase("ready"))
    order = [content.index(f"Run {name}<") for name in ("hungry", "busy", "live", "old")]
    assert order == sorted(order)


def test_the_share_drawn_of_each_environment_and_tag_stands_beside_the_share_trained():
    shares = [
        messages.TaskShare(kind="environment", name="game:A", drawn=60, trained=50),
        messages.TaskShare(kind="environment", name="game:B", drawn=20, trained=0),
        messages.TaskShare(kind="tag", name="hard", drawn=20),
    ]
    content = render.content(service(run(shares=shares)), ServicePhase("ready"))
    cells = re.findall(r"<td[^>]*>([^<]*)(?:<code>([^<]*)</code>)?</td>", content)
    text = [first + second for first, second in cells]
    assert text[:5] == ["environment game:A", "60", "50", "75.0 %", "100.0 %"]
    assert text[5:10] == ["environment game:B", "20", "0", "25.0 %", "0.0 %"]
    assert text[10:15] == ["tag hard", "20", "0", "25.0 %", "0.0 %"]
    assert "Shares of tasks" not in render.content(service(run(shares=shares[:1])), ServicePhase("ready"))


def test_runs_that_are_over_are_collapsed():
    content = render.content(service(run(name="old", state="closed"), run(name="live")), ServicePhase("ready"))
    collapsed = content[content.index("<details>") : content.index("</details>")]
    assert "Run old" in collapsed
    assert "Run live" not in collapsed
    assert "<details>" not in render.content(service(run()), ServicePhase("ready"))
    assert "No run is active" in render.content(service(run(state="closed")), ServicePhase("ready"))


def test_a_learner_that_is_gone_or_silent_is_not_shown_as_training_and_what_it_holds_is_stated():
    fields = {"learner_doing": "training", "learner_doing_s": 301.0}
    assert "has been training" in render.headline(run(**fields)).sentence
    silent = render.headline(run(**fields, learner_silent=True, learner_heard_s=61.0, learner_holds=1))
    assert (silent.tone, silent.sentence) == (
        "idle",
        "The learner is silent: its last message came 61 s ago. It holds a batch unacked until the lease runs out.",
    )
    gone = render.headline(run(learner_doing="gone", learner_doing_s=5.0, learner_silent=True))
    assert (gone.tone, gone.sentence) == ("idle", "No learner is connected: the last one ended 5 s ago.")


def test_a_worker_that_has_sent_nothing_for_long_is_shown_as_silent():
    worker = messages.WorkerStatus(worker="w", pool="p", capabilities=[], slots=1, leased=1, seen_s=1.0, draining=False)
    assert render.worker_state(worker) == "working"
    assert render.worker_state(msgspec.structs.replace(worker, silent=True)) == "silent"


def test_names_and_messages_are_escaped():
    reason = messages.Reason(code="collecting", message="<script>alert(1)</script>")
    page = render.console(service(run(learner_waiting=True, reasons=[reason])), ServicePhase("ready"))
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page


async def test_while_the_disk_refuses_writes_the_page_begins_with_that(api: Api, monkeypatch: pytest.MonkeyPatch):
    await api.create_run()
    async with api.session.get("/events") as answer:
        assert b"disk refuses" not in await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 10)
        with refusing_disk(monkeypatch):
            await api.ask("POST", "/v1/runs/run/close", status=507)
            content = b""
            while b"disk refuses" not in content:
                content = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 10)
            async with api.session.get("/") as page:
                text = await page.text()
    assert text.index("The disk refuses writes: No space left on device.") < text.index("Run run")
    assert "the orchestrator continues by itself" in text


async def test_the_page_is_complete_without_scripts_has_none_of_its_own_and_loads_nothing_from_other_hosts(api: Api):
    await api.create_run()
    async with api.session.get("/") as answer:
        page = await answer.text()
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "No learner has pulled from this run yet." in page
    assert not re.search(r'(src|href)="(https?:)?//', page)
    assert not re.search(r"<script>|<style>|style=|\bon\w+=", page), "it has a script or a style of its own"
    for name in set(re.findall(r'(?:src|href)="(console\.\w+)"', page)):
        async with api.session.get(f"/{name}") as answer:
            assert answer.status == 200


async def test_the_stream_sends_the_content_when_it_changes(api: Api):
    async with api.session.get("/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        first = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 10)
        assert b"No run yet" in first
        await api.create_run(name="fresh")
        second = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 10)
        while b"Run fresh" not in second:
            second = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 10)


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    async with chromium() as found:
        yield found


@pytest.mark.component("chromium")
async def test_a_browser_shows_whether_the_learner_waits_and_follows_the_service(api: Api, browser: Any):
    await api.create_run()
    url = str(api.session._base_url)
    page = await browser.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    await page.goto(url)
    status = page.get_by_role("status")
    assert await status.inner_text() == "No learner has pulled from this run yet."

    pulling = asyncio.create_task(api.pull(wait_s=60))
    await until(lambda: says(status, "The learner is waiting for"))
    await api.play(free=4)
    await pulling
    await until(lambda: says(status, "it has been training"))
    assert await page.get_by_text("This page follows the service.").count() == 1
    assert problems == []
    await page.close()


@pytest.mark.component("chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_has_enough_contrast_in_light_and_dark(api: Api, browser: Any, scheme: str):
    await api.create_run()
    page = await browser.new_page(color_scheme=scheme, java_script_enabled=True)
    await page.goto(str(api.session._base_url))
    colors = await page.evaluate(
        "[...document.querySelectorAll('h2, p, dt, dd, a')].map(e => [getComputedStyle(e).color, "
        "getComputedStyle(e.closest('section') || document.body).backgroundColor])"
    )
    assert colors
    for ink, paper in colors:
        assert contrast(ink, paper) >= 4.5, (ink, paper)
    await page.close()


async def says(status: Any, words: str) -> bool:
    return words in await status.inner_text()


def contrast(ink: str, paper: str) -> float:
    """The contrast ratio of WCAG."""
    high, low = sorted((luminance(ink), luminance(paper)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

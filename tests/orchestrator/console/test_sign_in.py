"""Signing in with a token, by plain requests and in a real browser; and what pages of other sites can do then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from headrace.errors import ForeignOrigin
from headrace.server.auth import Token
from headrace_orchestrator.api.browser_sessions import MAX_SESSIONS, SESSION_S, BrowserSessions
from tests.orchestrator.api.test_auth import token_of, write_tokens
from tests.orchestrator.console.browser import chromium
from tests.orchestrator.serving import Api, orchestrator

PAGE = {"Accept": "text/html"}


@pytest.fixture
async def guarded(data_dir: Path, tmp_path: Path) -> AsyncIterator[Api]:
    """An orchestrator with tokens, and a client that keeps cookies."""
    async with orchestrator(data_dir, tokens=write_tokens(tmp_path / "tokens.toml")) as api:
        url = str(api.session._base_url)
        async with aiohttp.ClientSession(url, cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            yield Api(session)


def url_of(api: Api) -> str:
    return str(api.session._base_url).rstrip("/")


async def sign_in(api: Api, role: str, page: str = "", **headers: str) -> aiohttp.ClientResponse:
    form = {"token": token_of(role), "page": page}
    headers = {"Origin": url_of(api), **headers}
    return await api.session.post("/sign-in", data=form, headers=headers, allow_redirects=False)


async def status_of(api: Api, method: str, path: str, **headers: str) -> int:
    async with api.session.request(method, path, headers=headers, allow_redirects=False) as answer:
        return answer.status


async def test_a_browser_that_asks_for_a_page_without_a_token_gets_the_page_to_sign_in(guarded: Api):
    for path in ("/", "/docs", "/metrics"):
        async with guarded.session.get(path, headers=PAGE) as answer:
            assert (answer.status, answer.content_type) == (401, "text/html")
            assert f'name="page" value="{path[1:]}"' in await answer.text()
    async with guarded.session.get("/v1/runs", headers=PAGE) as answer:
        assert (answer.status, answer.content_type) == (401, "application/problem+json")
    async with guarded.session.get("/") as answer:
        assert (answer.status, answer.content_type) == (401, "application/problem+json")


@pytest.mark.parametrize("role", ["viewer", "admin"])
async def test_a_cookie_stands_for_the_token_after_it_was_sent_once(guarded: Api, role: str):
    answer = await sign_in(guarded, role, page="docs")
    assert (answer.status, answer.headers["Location"]) == (303, "./docs")
    cookie = answer.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert token_of(role) not in cookie
    for path in ("/", "/docs", "/metrics", "/v1/status"):
        assert await status_of(guarded, "GET", path) == 200
    drained = await status_of(guarded, "POST", "/v1/workers/w/drain", Origin=url_of(guarded))
    assert drained == (200 if role == "admin" else 403), "the roles are those of the token"


async def test_the_cookie_is_sent_over_tls_only_if_the_page_was(guarded: Api):
    answer = await sign_in(guarded, "viewer", Origin="https://console.example", **{"Sec-Fetch-Site": "same-origin"})
    assert "Secure" in answer.headers["Set-Cookie"]


@pytest.mark.parametrize(
    ("role", "status", "named"), [("worker", 403, "worker"), ("nobody", 401, "unknown"), ("", 401, "unknown")]
)
async def test_a_token_that_cannot_see_the_console_is_refused_on_the_page(
    guarded: Api, role: str, status: int, named: str
):
    answer = await sign_in(guarded, role)
    assert answer.status == status
    assert "Set-Cookie" not in answer.headers
    page = await answer.text()
    assert named in page[page.index('role="alert"') :]
    assert token_of("viewer") not in page


async def test_a_session_ends_when_the_browser_signs_out(guarded: Api):
    await sign_in(guarded, "viewer")
    kept = {c.key: c.value for c in guarded.session.cookie_jar}
    answer = await guarded.session.post("/sign-out", headers={"Origin": url_of(guarded)}, allow_redirects=False)
    assert (answer.status, answer.headers["Location"]) == (303, "./sign-in")
    assert await status_of(guarded, "GET", "/") == 401
    async with guarded.session.get("/", cookies=kept) as answer:
        assert answer.status == 401, "the cookie is still accepted"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_a_request_with_a_cookie_that_changes_something_must_come_from_a_page_of_this_service(
    guarded: Api, headers: dict[str, str]
):
    await sign_in(guarded, "admin")
    admin = {"Authorization": f"Bearer {token_of('admin')}"}
    async with guarded.session.post("/v1/runs", json={"name": "run"}, headers=admin) as answer:
        assert answer.status == 201
    assert await status_of(guarded, "POST", "/v1/runs/run/close", **headers) == 403
    assert await status_of(guarded, "POST", "/sign-out", **headers) == 403
    assert await status_of(guarded, "POST", "/sign-in", **headers) == 403
    assert (await guarded.ask("GET", "/v1/runs/run"))["state"] == "active"
    assert await status_of(guarded, "POST", "/v1/runs/run/close", Origin=url_of(guarded)) == 200


async def test_the_page_after_signing_in_is_one_of_this_service(guarded: Api):
    for page in ("//evil.example", "https://evil.example", "../x", "a/b", "x\r\nSet-Cookie: a=b"):
        answer = await sign_in(guarded, "viewer", page=page)
        assert answer.headers["Location"] == "./", page


async def test_without_tokens_there_is_nothing_to_sign_in_to(api: Api):
    assert await status_of(api, "GET", "/sign-in") == 303
    assert await status_of(api, "GET", "/") == 200


def header(**headers: str) -> Any:
    return lambda name: headers.get(name.decode().replace("-", "_"), "")


def cookie_of(set_cookie: str) -> str:
    return set_cookie.partition(";")[0]


def test_a_session_ends_after_a_time_and_the_oldest_at_the_bound():
    now = 0.0
    sessions = BrowserSessions(lambda: now)
    token = Token(b"", "viewer", frozenset({"viewer"}))
    cookies = [cookie_of(sessions.begin(token, header(host="h:1"))) for _ in range(MAX_SESSIONS + 1)]
    held = [sessions.token(header(host="h:1", cookie=cookie), "GET") for cookie in cookies]
    assert held == [None, *[token] * MAX_SESSIONS]
    assert sessions.token(header(host="h:2", cookie=cookies[-1]), "GET") is None, "another port of the host"
    assert sessions.token(header(host="h:1", cookie=f"a=b; {cookies[-1]}; c"), "GET") is token
    with pytest.raises(ForeignOrigin):
        sessions.token(header(host="h:1", cookie=cookies[-1]), "POST")
    now = SESSION_S
    assert sessions.token(header(host="h:1", cookie=cookies[-1]), "GET") is None


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    async with chromium() as found:
        yield found


@asynccontextmanager
async def other_site(host: str, page: str) -> AsyncIterator[str]:
    """The address of a page of another site, or of another port of this host."""

    async def show(request: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html")

    app = web.Application()
    app.router.add_get("/", show)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    try:
        yield f"http://{host}:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def signed_in(page: Any, guarded: Api, role: str) -> None:
    """Sign in as a person does."""
    await page.goto(url_of(guarded))
    await page.get_by_label("Token").fill(token_of(role))
    await page.get_by_role("button", name="Sign in").click()


@pytest.mark.component("chromium")
async def test_a_browser_signs_in_sees_the_console_follow_the_service_and_signs_out(guarded: Api, browser: Any):
    page = await browser.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Security Policy" in message.text else None)
    await page.goto(f"{url_of(guarded)}/docs")
    await page.get_by_label("Token").fill("of-nobody-at-all")
    await page.get_by_role("button", name="Sign in").click()
    assert "unknown" in await page.get_by_role("alert").inner_text()
    await page.get_by_label("Token").fill(token_of("viewer"))
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("heading", name="The HTTP interface").wait_for()  # the page that it asked for
    await page.get_by_role("link", name="Console").click()
    await page.get_by_text("This page follows the service.").wait_for()
    assert "of-the-viewer" not in str(await page.context.cookies())
    assert await page.evaluate("document.cookie") == ""
    await page.get_by_role("button", name="Sign out").click()
    await page.get_by_label("Token").wait_for()
    await page.goto(url_of(guarded))
    await page.get_by_label("Token").wait_for()
    assert problems == []
    await page.close()


@pytest.mark.component("chromium")
@pytest.mark.parametrize(("host", "status"), [("127.0.0.2", 401), ("127.0.0.1", 403)])
async def test_a_form_of_another_site_cannot_close_a_run_with_an_administrators_session(
    guarded: Api, browser: Any, host: str, status: int
):
    """A browser does not send the cookie from another site, but it does from another port of the same host."""
    admin = {"Authorization": f"Bearer {token_of('admin')}"}
    async with guarded.session.post("/v1/runs", json={"name": "run"}, headers=admin) as answer:
        assert answer.status == 201
    target = f"{url_of(guarded)}/v1/runs/run/close"
    page = await browser.new_page()
    await signed_in(page, guarded, "admin")
    await page.get_by_role("heading", name="Run run").wait_for()
    async with other_site(host, f'<form method="post" action="{target}"><button>Win</button></form>') as url:
        await page.goto(url)
        async with page.expect_response(target) as answered:
            await page.get_by_role("button").click()
        assert (await answered.value).status == status
    async with guarded.session.get("/v1/runs/run", headers=admin) as answer:
        assert (await answer.json())["state"] == "active"
    await page.close()


@pytest.mark.component("chromium")
async def test_a_page_whose_session_ended_leads_to_the_page_to_sign_in(guarded: Api, browser: Any):
    page = await browser.new_page()
    await signed_in(page, guarded, "viewer")
    await page.get_by_text("This page follows the service.").wait_for()
    await page.context.clear_cookies()
    await page.evaluate("retry()")
    await asyncio.wait_for(page.get_by_label("Token").wait_for(), 20)
    await page.close()

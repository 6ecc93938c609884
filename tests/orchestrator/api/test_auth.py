"""Roles of routes, tokens and requests of web pages."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from headrace.errors import SetupError
from headrace.server.auth import ROLES, Role, load_auth
from headrace_orchestrator.api.app import OPEN_BODY_BYTES
from headrace_orchestrator.api.routes import ROUTES
from tests.orchestrator.serving import Api, orchestrator

OPEN_PATHS = {"/healthz", "/readyz", "/sign-in", "/sign-out", "/console.js", "/console.css"}


def token_of(role: str) -> str:
    return f"token-of-the-{role}-{len(role):08d}"


def write_tokens(path: Path) -> Path:
    """A token file with one token for each role, every second one as a digest."""
    lines = []
    for number, role in enumerate(ROLES):
        token = token_of(role)
        secret = f'token = "{token}"' if number % 2 else f'sha256 = "{hashlib.sha256(token.encode()).hexdigest()}"'
        lines.append(f'[[tokens]]\nname = "{role}"\nroles = ["{role}"]\n{secret}\n')
    path.write_text("\n".join(lines))
    return path


async def status_of(api: Api, method: str, path: str, headers: dict[str, str]) -> int:
    async with api.session.request(method, path, headers=headers, data=b"{" if method == "POST" else None) as answer:
        return answer.status


async def test_every_route_admits_its_roles_and_no_other(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir, tokens=write_tokens(tmp_path / "tokens.toml")) as api:
        for route in ROUTES:
            if route.path == "/events":
                continue  # a stream that never ends; its role is that of the console
            path = route.path.replace("{run}", "r").replace("{worker}", "w").replace("{batch}", "b")
            path = path.replace("{evaluation}", "e").replace("{trajectory}", "t")
            where = f"{route.method} {route.path}"
            if not route.roles:
                assert route.path in OPEN_PATHS, f"{where} is open to all"
                continue
            assert await status_of(api, route.method, path, {}) == 401, where
            wrong = {"Authorization": "Bearer nobody-knows-this-token"}
            assert await status_of(api, route.method, path, wrong) == 401, where
            for role in ROLES:
                status = await status_of(api, route.method, path, {"Authorization": f"Bearer {token_of(role)}"})
                allowed = role == "admin" or role in route.roles
                assert (status not in (401, 403)) == allowed, f"{where} as {role}: {status}"
                assert allowed or status == 403, where


def test_the_stream_has_the_role_of_the_console():
    roles = {route.path: route.roles for route in ROUTES}
    assert roles["/events"] == roles["/"] == frozenset[Role]({"viewer"})


def test_no_route_is_for_learners_and_for_workers():
    for route in ROUTES:
        if "/worker/" in route.path:
            assert route.roles == frozenset[Role]({"worker"})
        elif route.method == "POST":
            assert "worker" not in route.roles
            assert "viewer" not in route.roles


async def test_only_a_bearer_token_is_asked_for_and_accepted(data_dir: Path, tmp_path: Path):
    """A browser would send the password of basic auth with requests that other sites cause, too."""
    async with orchestrator(data_dir, tokens=write_tokens(tmp_path / "tokens.toml")) as api:
        async with api.session.get("/v1/runs") as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, 'Bearer realm="headrace"')
        basic = base64.b64encode(f"anyone:{token_of('viewer')}".encode()).decode()
        assert await status_of(api, "GET", "/v1/runs", {"Authorization": f"Basic {basic}"}) == 401


async def test_little_of_a_body_is_read_before_a_token_was_accepted(data_dir: Path, tmp_path: Path):
    async with orchestrator(data_dir, tokens=write_tokens(tmp_path / "tokens.toml")) as api:
        for method, path in (("GET", "/healthz"), ("POST", "/sign-in"), ("POST", "/sign-out")):
            async with api.session.request(method, path, data=bytes(OPEN_BODY_BYTES + 1)) as answer:
                assert answer.status == 413, path


def test_a_loopback_bind_needs_no_tokens_and_any_other_is_refused_at_start(data_dir: Path):
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        load_auth(None, host).check("", frozenset({"admin"}))
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(SetupError, match="--tokens"):
            load_auth(None, host)


async def test_an_open_bind_without_tokens_does_not_touch_the_data_directory(data_dir: Path):
    with pytest.raises(SetupError):
        async with orchestrator(data_dir, host="0.0.0.0"):
            pass
    assert not data_dir.exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "tokens"),
        ("tokens = []", "holds no token"),
        ("[[tokens]", "not valid"),
        ('[[tokens]]\nname = "a"\nroles = ["king"]\ntoken = "0123456789abcdef"', "king"),
        ('[[tokens]]\nname = "a"\nroles = ["king"]\ntoken = "0123456789abcdef"', "of learner, worker"),
        ('[[tokens]]\nname = "a"\nroles = []\ntoken = "0123456789abcdef"', "no roles"),
        ('[[tokens]]\nname = "a"\nroles = ["admin"]', "either token or sha256"),
        ('[[tokens]]\nname = "a"\nroles = ["admin"]\ntoken = "short"', "16 characters"),
        ('[[tokens]]\nname = "a"\nroles = ["admin"]\nsha256 = "zz"', "64 hexadecimal"),
    ],
)
def test_the_error_of_an_invalid_token_file_names_the_place(tmp_path: Path, text: str, named: str):
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    with pytest.raises(SetupError) as caught:
        load_auth(file, "127.0.0.1")
    assert named in str(caught.value)


def test_one_token_under_two_names_is_refused(tmp_path: Path):
    file = tmp_path / "tokens.toml"
    admin = '[[tokens]]\nname = "a"\nroles = ["admin"]\ntoken = "0123456789abcdef"\n'
    digest = hashlib.sha256(b"0123456789abcdef").hexdigest()
    file.write_text(f'{admin}[[tokens]]\nname = "b"\nroles = ["viewer"]\nsha256 = "{digest}"\n')
    with pytest.raises(SetupError, match=r"'a' and 'b' in .* are the same"):
        load_auth(file, "127.0.0.1")


def test_a_token_file_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(SetupError, match="cannot be read"):
        load_auth(tmp_path / "nothing", "127.0.0.1")


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"Origin": "http://evil.example"}, "evil.example"),
        ({"Origin": "null"}, "null"),
        ({"Host": "rebound.example:8470"}, "rebound.example"),
    ],
)
async def test_without_tokens_the_service_obeys_programs_and_not_web_pages(
    api: Api, headers: dict[str, str], named: str
):
    given = {"Content-Type": "application/json", **headers}
    async with api.session.post("/v1/runs", data=b'{"name":"run"}', headers=given) as answer:
        assert answer.status == 403
        assert answer.headers["Content-Type"] == "application/problem+json"
        problem = await answer.json(content_type=None)
        assert (problem["code"], problem["title"]) == ("foreign-origin", "The request comes from another origin")
        assert named in problem["detail"]
    assert await api.ask("GET", "/v1/runs") == []
    own = str(api.session._base_url).rstrip("/")
    for fine in ({"Origin": own}, {"Host": f"localhost:{own.rpartition(':')[2]}"}):
        async with api.session.get("/v1/runs", headers=fine) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded"])
async def test_without_tokens_a_body_of_a_type_that_any_page_may_send_is_an_unsupported_type(api: Api, media_type: str):
    async with api.session.post("/v1/runs", data=b'{"name":"run"}', headers={"Content-Type": media_type}) as answer:
        assert answer.status == 415
        problem = await answer.json(content_type=None)
        assert problem["code"] == "unsupported-media-type"
        assert media_type in problem["detail"]
        assert "application/json" in problem["hint"]
    assert await api.ask("GET", "/v1/runs") == []


async def test_with_tokens_the_token_decides_and_not_the_origin(data_dir: Path, tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[tokens]]\nname = "v"\nroles = ["viewer"]\ntoken = "0123456789abcdef"\n')
    async with orchestrator(data_dir, tokens=tokens) as api:
        headers = {
            "Authorization": "Bearer 0123456789abcdef",
            "Host": "proxy.example",
            "Origin": "https://proxy.example",
        }
        async with api.session.get("/v1/runs", headers=headers) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("value", ["Basic \xe9\xe9", "Basic !", "Bearer \xe9", "Nothing"])
async def test_an_authorization_that_cannot_be_read_is_not_a_token(data_dir: Path, tmp_path: Path, value: str):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[tokens]]\nname = "v"\nroles = ["viewer"]\ntoken = "0123456789abcdef"\n')
    async with (
        orchestrator(data_dir, tokens=tokens) as api,
        api.session.get("/v1/runs", headers={"Authorization": value}) as answer,
    ):
        assert answer.status == 401

"""Requests with an extreme value in any field: each is refused as the client's fault, or carried out, and the service
goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_orchestrator.api.http import NAME_FIELDS
from headrace_orchestrator.api.routes import ROUTES
from tests.orchestrator.serving import Api, orchestrator

CHECKED = {
    "LeaseRequest.wait_s": "shortened to the longest poll",
    "PullRequest.wait_s": "shortened to the longest poll",
    "PullRequest.batch": "looked up",
    "PullRequest.groups": "looked up",
    "PullRequest.shard": "checked by the command",
    "PullRequest.shards": "checked by the command",
    "ResumeRequest.shards": "checked by the command",
    "AckRequest.generation": "compared with the lease's",
    "NackRequest.generation": "compared with the lease's",
    "AckRequest.version": "parsed",
    "VersionRequest.version": "parsed",
    "RewindRequest.version": "parsed",
    "EvaluationRequest.version": "parsed",
    "Weights.path": "checked by the handler, since stored ones are decoded as well",
    "AttemptKey.episode": "looked up",
    "AttemptKey.attempt": "compared with the lease's",
    "AttemptKey.nonce": "compared with the lease's",
    "GroupRequest.size": "checked by the command",
    "GroupRequest.id": "checked by the handler",
    "EvaluationRequest.episodes_per_task": "checked by the command",
    "PrioritiesRequest.priorities": "checked by the command",
}
"""Fields that something else than the decoder checks."""

LISTS = {"HeartbeatRequest.holding", "LeaseRequest.holding", "ReturnRequest.attempts", "SubmitGroupsRequest.groups"}
LISTS |= {"EvaluationRequest.tasks"}
"""Lists that the bytes of a body bound."""

EXTREMES = (
    *(-(2**63), -1, 0, 2**53 + 1, 2**64 - 1, 2**70, 1e-300, 1e300),
    *("", "a/b", "a\nb", "\0", "x" * 100_000),
    *(None, [], {}, ["x"] * 2000, {"x": 1e300}),
)

BODIES: dict[str, dict[str, Any]] = {
    "worker/lease": {"worker": "w", "slots": 1, "free": 0, "pool": "p", "capabilities": [], "wait_s": 0, "holding": []},
    "worker/heartbeat": {"worker": "w", "slots": 1, "pool": "p", "holding": [], "stats": {}},
    "worker/return": {"worker": "w", "attempts": []},
    "worker/assets": {"names": []},
    "assets": {"names": []},
    "runs/run/groups": {
        "groups": [{"task": {"environment": "test:Echo", "seed": 0, "id": "t", "tags": []}, "size": 1}]
    },
    "runs/run/pull": {
        "learner": "l",
        "session": "s",
        "request": "r",
        "wait_s": 0,
        "shard": 0,
        "shards": 1,
        "batch": "",
        "environments": [],
        "tags": [],
    },
    "runs/run/resume": {"learner": "l", "session": "s", "shards": 1},
    "runs/run/batches/b/ack": {"learner": "l", "session": "s", "generation": 1, "version": ""},
    "runs/run/batches/b/nack": {"learner": "l", "session": "s", "generation": 1, "reason": ""},
    "runs/run/version": {"version": "0.0", "weights": None},
    "runs/run/rewind": {"version": "0.0"},
    "runs/run/priorities": {"priorities": {}},
    "runs/run/doing": {"learner": "l", "session": "s", "doing": "idle"},
    "runs/run/evaluations": {
        "tasks": [{"environment": "test:Echo"}],
        "episodes_per_task": 1,
        "version": "",
        "temperature": None,
        "deadline_s": 1.0,
    },
    "runs/run/servers/drain": {"address": "http://127.0.0.1:9"},
}
"""A valid body of each route, or one that is refused for what it names."""


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    key, *rest = path
    new = replaced(tree[key], tuple(rest), value) if rest else value
    return {**tree, key: new} if isinstance(tree, dict) else [*tree[:key], new, *tree[key + 1 :]]


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_with_any_value_in_any_field_is_refused_or_carried_out(data_dir: Path, path: str) -> None:
    async with orchestrator(data_dir, max_wait_s=0.01) as api:
        await _send_extremes(api, path)


async def _send_extremes(api: Api, path: str) -> None:
    await api.create_run(environments=[], selection={"order": "prioritized"})
    body = BODIES[path]
    for field in leaves(body):
        for value in EXTREMES:
            data = json.dumps(replaced(body, field, value)).encode()
            async with api.session.post(f"/v1/{path}", data=data) as answer:
                said = await answer.read()
                assert answer.status < 500, (field, f"{value!r:.80}", said[:500])
                assert answer.status < 400 or len(said) < 20_000, (field, f"{value!r:.80}")
    for page in ("/v1/status", "/v1/runs/run/groups", "/metrics", "/"):
        async with api.session.get(page) as answer:
            assert answer.status == 200
            await answer.read()


def requests() -> set[type]:
    return {
        route.request
        for route in ROUTES
        if isinstance(route.request, type) and issubclass(route.request, msgspec.Struct)
    }


def structs_in(kind: type) -> set[type]:
    """The structs that a request is made of."""
    found = {kind}
    for field in msgspec.structs.fields(kind):
        for name, struct in _structs_of(field.type):
            if name not in {each.__name__ for each in found}:
                found |= structs_in(struct)
    return found


def _structs_of(kind: Any) -> Iterator[tuple[str, type]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind.__name__, kind
    for part in getattr(kind, "__args__", ()):
        yield from _structs_of(part)


def is_unbounded(kind: Any) -> bool:
    """True if values of this type need a check that the decoder does not make."""
    info = msgspec.inspect.type_info(kind)
    options = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    return any(_is_unbounded(option) for option in options)


def _is_unbounded(info: Any) -> bool:
    if isinstance(info, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return (info.ge is None and info.gt is None) or (info.le is None and info.lt is None)
    if isinstance(info, msgspec.inspect.StrType | msgspec.inspect.ListType | msgspec.inspect.DictType):
        return info.max_length is None
    return False


def test_every_field_of_every_request_has_bounds() -> None:
    unchecked = {
        f"{struct.__name__}.{field.name}"
        for kind in requests()
        for struct in structs_in(kind)
        for field in msgspec.structs.fields(struct)
        if field.name not in NAME_FIELDS and is_unbounded(field.type)
    }
    assert unchecked - LISTS - CHECKED.keys() == {"GroupRequest.task"}  # checked as a TaskSpec

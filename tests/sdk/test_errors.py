"""Error classes: their codes, and their form over HTTP."""

from __future__ import annotations

import json

import pytest

from headrace.errors import (
    LAYERS,
    EpisodeFailure,
    HeadraceError,
    InvalidRequest,
    RequestError,
    ServiceError,
    by_code,
    from_problem,
)

CLASSES = list(by_code().values())


def example(kind: type[HeadraceError]) -> HeadraceError:
    if issubclass(kind, EpisodeFailure):
        return kind("It failed.", hint="Repair it.", kind="broken", retryable=True, place=3)
    return kind("It failed.", hint="Repair it.", place=3)


def all_classes(kind: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [kind, *(descendant for child in kind.__subclasses__() for descendant in all_classes(child))]


def test_every_error_has_its_own_stable_code() -> None:
    stable = [kind for kind in all_classes(HeadraceError) if kind.__module__ == "headrace.errors"]
    assert sorted(kind.code for kind in stable) == sorted(by_code())
    assert all("code" in vars(kind) for kind in CLASSES)


@pytest.mark.parametrize("kind", CLASSES)
def test_over_http_an_error_is_a_problem_body_and_is_raised_again_as_the_same_class(kind: type[HeadraceError]) -> None:
    error = example(kind)
    body = json.loads(json.dumps(error.problem()))
    assert (body["type"], body["status"]) == (f"urn:headrace:problem:{kind.code}", kind.status)
    again = from_problem(body)
    assert type(again) is kind
    assert (again.detail, again.hint, again.extra, again.problem()) == (error.detail, error.hint, error.extra, body)


@pytest.mark.parametrize(("status", "kind"), [(404, RequestError), (503, ServiceError)])
def test_a_problem_with_an_unknown_code_becomes_the_base_class_of_its_status(
    status: int, kind: type[HeadraceError]
) -> None:
    assert type(from_problem({"code": "of-a-newer-release", "status": status, "detail": "New."})) is kind


def test_a_message_says_what_was_wrong_and_its_hint_what_to_do() -> None:
    error = HeadraceError("It failed.", hint="Repair it.")
    assert (str(error), error.detail, error.hint) == ("It failed. Repair it.", "It failed.", "Repair it.")


def test_a_failure_inside_an_episode_has_a_class_for_each_layer() -> None:
    assert {kind.layer for kind in EpisodeFailure.__subclasses__()} == set(LAYERS)


def test_a_class_without_a_code_of_its_own_does_not_stand_for_its_parent() -> None:
    class Special(InvalidRequest):
        def __init__(self, kind: str) -> None:
            super().__init__(kind)

    assert Special("x").code == "invalid-request"
    assert type(from_problem({"code": "invalid-request", "status": 400, "detail": "no"})) is InvalidRequest

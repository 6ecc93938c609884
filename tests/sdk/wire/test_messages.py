"""Rules for all control messages."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import pytest

from headrace.wire import messages

KINDS = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
OWN = [kind for kind in KINDS if kind.__module__.startswith("headrace.wire.messages.")]

QUANTITIES = {"reward", "mean_reward", "temperature", "running", "waiting", "kv_cache_used"}
"""Numbers of messages that are not durations."""


def fields(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@pytest.mark.parametrize("kind", OWN)
def test_messages_hold_durations_in_seconds_with_names_that_end_in_s(kind: type) -> None:
    floats = {name for name, type_ in fields(kind).items() if type_ in (float, float | None)}
    assert {name for name in floats if not name.endswith("_s")} <= QUANTITIES
    assert not [name for name in fields(kind) if name.endswith(("_at", "_time", "timestamp"))]


@pytest.mark.parametrize("kind", [kind for kind in OWN if kind.__name__.endswith("Reply")])
def test_every_reply_carries_the_epoch_of_the_orchestrator(kind: type) -> None:
    assert fields(kind)["epoch"] is int


@pytest.mark.parametrize("kind", OWN)
def test_readers_ignore_unknown_fields(kind: type[msgspec.Struct]) -> None:
    assert not kind.__struct_config__.forbid_unknown_fields


def test_a_message_with_a_field_of_a_newer_release_is_read() -> None:
    reply = msgspec.json.decode(b'{"epoch": 3, "version": "0.4", "new": {"a": 1}}', type=messages.VersionReply)
    assert reply == messages.VersionReply(epoch=3, version="0.4")


def test_the_package_has_every_message_of_its_modules() -> None:
    assert len(OWN) > 40
    assert {kind.__module__.rpartition(".")[2] for kind in OWN} >= {"batches", "evaluations", "groups", "workers"}

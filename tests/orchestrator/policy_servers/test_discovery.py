"""Policy servers by name."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidRunSpec
from headrace.runspec import parse_run_spec
from headrace.wire.policy_server import canonical_address
from headrace_orchestrator.policy_servers.discovery import DRAIN_S, LOOKUP_EVERY_S, Discovery, host_of

NAME = "dns+http://vllm.train.svc:8000"
ONE, TWO = "http://127.0.0.1:8000", "http://127.0.0.2:8000"
FIXED = "http://127.0.0.9:8000"


class Resolver:
    """A run with one name; lookups are answered by hand."""

    def __init__(self, **given: bool) -> None:
        self.now = 0.0
        self.given = {NAME: False, **given}
        self.discovery = Discovery()
        self.discovery.take_servers(self.given)

    def look(self, *hosts, problem=""):
        self.now += LOOKUP_EVERY_S
        assert self.discovery.step(self.now) == [NAME]
        assert self.discovery.step(self.now) == [], "one lookup at a time"
        if problem:
            self.discovery.failed(NAME, problem, self.now)
        else:
            self.discovery.found(NAME, hosts, self.now)
        return self.servers()

    def servers(self, ejected=()):
        return self.discovery.servers(self.given, ejected, self.now)


def test_servers_come_and_go_with_their_name_and_are_drained_when_they_vanish():
    resolver = Resolver()
    assert resolver.servers() == {}
    assert resolver.look("127.0.0.1") == {ONE: False}
    assert resolver.look("127.0.0.2", "127.0.0.1") == {ONE: False, TWO: False}
    assert resolver.look("127.0.0.2") == {ONE: True, TWO: False}
    assert resolver.look("127.0.0.2", "127.0.0.1") == {ONE: False, TWO: False}, "it is back"


def test_a_server_that_vanished_is_forgotten_once_it_answers_no_more_or_had_its_time():
    resolver = Resolver()
    resolver.look("127.0.0.1", "127.0.0.2")
    resolver.look()
    assert resolver.servers(ejected=(ONE,)) == {TWO: True}
    resolver.now += DRAIN_S
    assert resolver.servers() == {}


def test_a_lookup_that_fails_changes_nothing_and_a_name_that_stands_for_nothing_is_named():
    resolver = Resolver()
    assert "was not looked up yet" in resolver.discovery.reasons()[0].message
    resolver.look("127.0.0.1")
    assert resolver.discovery.reasons() == []
    assert resolver.look(problem="the resolver does not answer") == {ONE: False}
    resolver.look()
    (reason,) = resolver.discovery.reasons()
    assert (reason.code, NAME in reason.message) == ("no-policy-servers", True)


def test_lookups_of_a_name_are_so_far_apart():
    resolver = Resolver()
    resolver.look("127.0.0.1")
    assert resolver.discovery.due() == resolver.now + LOOKUP_EVERY_S
    assert resolver.discovery.step(resolver.now + LOOKUP_EVERY_S - 0.1) == []


def test_a_server_that_is_named_by_its_address_is_not_touched_by_names():
    resolver = Resolver()
    resolver.given |= {ONE: False, FIXED: True}
    assert resolver.look("127.0.0.1") == {ONE: False, FIXED: True}
    assert resolver.look("127.0.0.2") == {ONE: False, TWO: False, FIXED: True}


def test_draining_a_name_drains_all_that_it_stands_for():
    resolver = Resolver()
    resolver.look("127.0.0.1")
    resolver.given[NAME] = True
    assert resolver.servers() == {ONE: True}
    resolver.discovery.take_servers([])
    resolver.given = {}
    assert resolver.servers() == {}


def test_addresses_of_both_families_are_written_as_urls_have_them():
    resolver = Resolver()
    assert resolver.look("fd00::1", "127.0.0.1") == {"http://[fd00::1]:8000": False, ONE: False}
    assert host_of(NAME) == ("vllm.train.svc", 8000)


@pytest.mark.parametrize("text", ["dns+http://vllm", "dns+https://vllm:8000", "dns+http://vllm:8000/v1", "vllm:8000"])
def test_what_is_no_address_and_no_name_is_refused_with_what_is(text):
    with pytest.raises(ValueError, match="dns\\+http://vllm:8000"):
        canonical_address(text)
    with pytest.raises(InvalidRunSpec, match="not the address of a policy server"):
        parse_run_spec({"name": "r", "policy": {"endpoints": [text]}})

"""Policy servers found by DNS name."""

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
    """A run with one name, whose lookups are answered by hand."""

    def __init__(self, **listed: bool) -> None:
        self.now = 0.0
        self.listed = {NAME: False, **listed}
        self.discovery = Discovery()
        self.discovery.take_servers(self.listed)

    def look_up(self, *hosts, problem=""):
        self.now += LOOKUP_EVERY_S
        assert self.discovery.step(self.now) == [NAME]
        assert self.discovery.step(self.now) == [], "one lookup at a time"
        if problem:
            self.discovery.take_failure(NAME, problem, self.now)
        else:
            self.discovery.take_hosts(NAME, hosts, self.now)
        return self.servers()

    def servers(self, ejected=()):
        return self.discovery.servers(self.listed, ejected, self.now)


def test_servers_change_with_the_result_of_a_lookup_and_a_vanished_one_is_drained():
    resolver = Resolver()
    assert resolver.servers() == {}
    assert resolver.look_up("127.0.0.1") == {ONE: False}
    assert resolver.look_up("127.0.0.2", "127.0.0.1") == {ONE: False, TWO: False}
    assert resolver.look_up("127.0.0.2") == {ONE: True, TWO: False}
    assert resolver.look_up("127.0.0.2", "127.0.0.1") == {ONE: False, TWO: False}, "it is back"


def test_a_vanished_server_is_forgotten_when_it_stops_answering_or_after_a_while():
    resolver = Resolver()
    resolver.look_up("127.0.0.1", "127.0.0.2")
    resolver.look_up()
    assert resolver.servers(ejected=(ONE,)) == {TWO: True}
    resolver.now += DRAIN_S
    assert resolver.servers() == {}


def test_a_failed_lookup_changes_nothing_and_a_name_without_servers_is_a_reason():
    resolver = Resolver()
    assert "has not been looked up yet" in resolver.discovery.reasons()[0].message
    resolver.look_up("127.0.0.1")
    assert resolver.discovery.reasons() == []
    assert resolver.look_up(problem="the resolver does not answer") == {ONE: False}
    resolver.look_up()
    (reason,) = resolver.discovery.reasons()
    assert (reason.code, NAME in reason.message) == ("no-policy-servers", True)


def test_a_name_is_looked_up_periodically():
    resolver = Resolver()
    resolver.look_up("127.0.0.1")
    assert resolver.discovery.due() == resolver.now + LOOKUP_EVERY_S
    assert resolver.discovery.step(resolver.now + LOOKUP_EVERY_S - 0.1) == []


def test_a_server_that_the_run_also_lists_by_address_is_not_affected_by_names():
    resolver = Resolver()
    resolver.listed |= {ONE: False, FIXED: True}
    assert resolver.look_up("127.0.0.1") == {ONE: False, FIXED: True}
    assert resolver.look_up("127.0.0.2") == {ONE: False, TWO: False, FIXED: True}


def test_draining_a_name_drains_all_its_servers():
    resolver = Resolver()
    resolver.look_up("127.0.0.1")
    resolver.listed[NAME] = True
    assert resolver.servers() == {ONE: True}
    resolver.discovery.take_servers([])
    resolver.listed = {}
    assert resolver.servers() == {}


def test_ipv4_and_ipv6_addresses_become_urls():
    resolver = Resolver()
    assert resolver.look_up("fd00::1", "127.0.0.1") == {"http://[fd00::1]:8000": False, ONE: False}
    assert host_of(NAME) == ("vllm.train.svc", 8000)


@pytest.mark.parametrize("text", ["dns+http://vllm", "dns+https://vllm:8000", "dns+http://vllm:8000/v1", "vllm:8000"])
def test_an_endpoint_that_is_neither_address_nor_name_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="dns\\+http://vllm:8000"):
        canonical_address(text)
    with pytest.raises(InvalidRunSpec, match="not the address of a policy server"):
        parse_run_spec({"name": "r", "policy": {"endpoints": [text]}})

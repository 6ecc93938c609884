"""The policy servers of a run in the scheduler's state, and the weights that they load."""

from __future__ import annotations

import pytest

from headrace.errors import Conflict, InvalidRequest, InvalidRunSpec, UnknownServer, VersionConflict
from headrace.runspec import parse_run_spec
from headrace.trajectory import Version
from headrace.wire import messages
from headrace.wire.policy_server import base_url
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.state.evaluations import REPORT_LEASE_S
from headrace_orchestrator.scheduler.state.policy_servers import REMEMBERED_DIGESTS

A, B = "http://a:1", "http://b:1"


def served(harness, version: str) -> None:
    """A server takes requests with a version."""
    weights = messages.Weights(path=f"/w/{version}")
    harness.core.weights_served("r", Version.parse(version), weights, harness.now)
    harness.settle()


def evaluate(harness, version: str = "", *, episodes: int = 2, deadline_s: float = 60.0) -> str:
    request = messages.EvaluationRequest(
        tasks=[{"environment": "game:A"}], episodes_per_task=episodes, version=version, deadline_s=deadline_s
    )
    found = harness.core.start_evaluation("r", request, harness.now)
    harness.settle()
    return found


def hold_s(harness) -> float:
    return harness.core.sync_hold("r", harness.now)[0]


def test_servers_begin_with_those_of_the_spec_and_change_by_events_of_their_own(harness):
    harness.run(policy={"endpoints": [f"{A}/"]})
    servers = harness.core.policy_servers("r")
    harness.core.add_server("r", B, harness.now)
    harness.core.drain_server("r", A, harness.now)
    assert servers.servers == {A: True, B: False}
    harness.core.add_server("r", A, harness.now)
    harness.core.remove_server("r", B, harness.now)
    assert servers.servers == {A: False}
    harness.settle()
    changes = (events.ServerAdded, events.ServerDrained, events.ServerRemoved)
    assert len([event for event in harness.log if isinstance(event, changes)]) == 4
    harness.restart()
    harness.restart(harness.restored(harness.core.snapshot()))


def test_a_run_that_names_no_servers_gets_none(harness):
    harness.run()
    with pytest.raises(Conflict, match="would not use this one"):
        harness.core.add_server("r", A, harness.now)
    assert harness.core.policy_servers("r").servers == {}


@pytest.mark.parametrize("other", ["/", "/v1", "/v1/"])
def test_a_server_is_one_however_its_address_is_written(harness, other):
    plain = "http://policy:8471/Behind"
    harness.run(policy={"endpoints": [plain, f"HTTP://Policy:8471/Behind{other}"]})
    harness.core.add_server("r", f"http://POLICY:8471/Behind{other}", harness.now)
    assert harness.core.policy_servers("r").servers == {plain: False}
    assert base_url("http://Me:Secret@HOST/") == "http://Me:Secret@host"


def test_a_change_without_effect_emits_no_event_and_an_unknown_server_is_an_error(harness):
    harness.run(policy={"endpoints": [A]})
    harness.core.add_server("r", A, harness.now)
    harness.core.drain_server("r", A, harness.now)
    harness.core.drain_server("r", A, harness.now)
    assert len(harness.settle()) == 1
    with pytest.raises(UnknownServer, match=B):
        harness.core.remove_server("r", B, harness.now)
    with pytest.raises(InvalidRequest, match="not the address"):
        harness.core.add_server("r", "b:1", harness.now)


def test_a_version_with_weights_is_loaded_by_the_service_and_one_without_was_loaded_by_the_learner(harness):
    harness.run()
    servers = harness.core.policy_servers("r")
    harness.announce("0.1")
    assert (servers.target, servers.held) == (None, Version(0, 1))
    harness.announce("0.2", path="/w/2")
    assert (servers.target, servers.held, servers.weights.path) == (
        Version(0, 2),
        Version(0, 1),
        "/w/2",
    )
    served(harness, "0.2")
    assert servers.held == Version(0, 2)
    harness.announce("0.3")
    assert (servers.target, servers.held) == (None, Version(0, 3))
    harness.restart()


def test_an_ack_announces_weights_and_weights_without_a_version_are_refused(harness):
    harness.run(batch_size=1)
    harness.work(1)
    batch = harness.batch()
    fields = {"learner": batch.learner, "session": batch.session, "generation": batch.generation}
    weights = messages.Weights(path="/w/1")
    with pytest.raises(InvalidRequest, match="names no version"):
        harness.core.ack("r", batch.id, messages.AckRequest(**fields, weights=weights), harness.now)
    harness.core.ack("r", batch.id, messages.AckRequest(**fields, version="0.1", weights=weights), harness.now)
    harness.settle()
    assert (harness.core.policy_servers("r").target, harness.core.policy_servers("r").weights) == (
        Version(0, 1),
        weights,
    )
    harness.restart()


def test_versions_that_were_overtaken_before_a_server_had_them_are_skipped(harness):
    harness.run()
    for n in (1, 2, 3, 4):
        harness.announce(f"0.{n}", path=f"/w/{n}")
        if n == 2:
            served(harness, "0.2")
    servers = harness.core.policy_servers("r")
    assert servers.skipped == [Version(0, 1), Version(0, 3)]
    harness.restart()
    harness.restart(harness.restored(harness.core.snapshot()))


def test_repeating_an_announcement_changes_nothing_and_served_weights_are_not_replaced_under_their_version(harness):
    harness.run()
    harness.announce("0.1", path="/w/1")
    harness.announce("0.1", path="/w/elsewhere")  # no server has it yet
    assert harness.core.policy_servers("r").weights.path == "/w/elsewhere"
    known = len(harness.log)
    harness.announce("0.1", path="/w/elsewhere")
    assert len(harness.log) == known
    served(harness, "0.1")
    with pytest.raises(VersionConflict, match=r"hold version 0\.1"):
        harness.announce("0.1", path="/w/1")


def test_after_a_rewind_the_servers_keep_what_they_hold_until_weights_come(harness):
    harness.run()
    harness.announce("0.1", path="/w/1")
    harness.announce("0.2", path="/w/2")
    served(harness, "0.2")
    harness.rewind("0.1")
    servers = harness.core.policy_servers("r")
    assert (servers.target, servers.held) == (Version(0, 2), Version(0, 2))
    harness.announce("1.1", path="/w/1")
    assert (servers.target, servers.weights.path) == (Version(1, 1), "/w/1")
    with pytest.raises(VersionConflict, match="rewind"):
        harness.announce("1.0", path="/w/0")


def announce(harness, version: str, digest: str) -> str:
    weights = messages.Weights(path=f"/w/{version}", digest=digest)
    request = messages.VersionRequest(version=version, weights=weights)
    reply = harness.core.announce("r", request, harness.now)
    harness.settle()
    return reply.same_weights_as


def test_the_same_bytes_under_a_new_number_name_the_first_version_that_had_them(harness):
    harness.run()
    answers = [announce(harness, f"0.{n}", digest) for n, digest in enumerate("abcaa", 1)]
    assert answers == ["", "", "", "0.1", "0.1"]
    harness.announce("0.6", path="/w/6")
    harness.announce("0.7", path="/w/7")
    assert announce(harness, "0.8", "b") == "0.2"
    harness.restart()
    assert announce(harness, "0.9", "c") == "0.3"


def test_the_served_version_may_be_announced_again_unless_its_files_changed(harness):
    harness.run()
    announce(harness, "0.1", "a")
    served(harness, "0.1")
    assert announce(harness, "0.1", "a") == ""
    assert announce(harness, "0.1", "") == "", "a learner that cannot read the folder"
    assert announce(harness, "0.1", "a") == ""
    with pytest.raises(VersionConflict, match=r"hold version 0\.1"):
        announce(harness, "0.1", "b")


def test_weights_of_a_checkpoint_in_a_new_lineage_are_not_told_as_repeated(harness):
    harness.run()
    announce(harness, "0.1", "a")
    announce(harness, "0.2", "b")
    harness.rewind("0.1")
    assert announce(harness, "1.1", "a") == ""


def test_a_bounded_number_of_digests_is_remembered(harness):
    harness.run()
    last = REMEMBERED_DIGESTS + 2
    for n in range(1, last + 1):
        announce(harness, f"0.{n}", str(n))
    assert list(harness.core.policy_servers("r").digests) == [str(n) for n in range(3, last + 1)]
    answers = [announce(harness, f"0.{last + 1}", "2"), announce(harness, f"0.{last + 2}", str(last))]
    assert answers == ["", f"0.{last}"]


def test_an_evaluation_holds_the_version_that_is_served_while_newer_ones_come(harness):
    harness.run()
    harness.announce("0.4", path="/w/4")
    served(harness, "0.4")
    evaluation = evaluate(harness, deadline_s=50.0)
    for n in (5, 6, 7):
        harness.announce(f"0.{n}", path=f"/w/{n}")
    assert harness.core.sync_hold("r", harness.now) == (50.0, [evaluation])
    harness.advance(50.0)
    assert hold_s(harness) == 0.0


def test_an_evaluation_whose_report_is_not_requested_holds_no_longer(harness):
    harness.run()
    evaluation = evaluate(harness, deadline_s=1000.0)
    harness.advance(REPORT_LEASE_S - 1)
    assert hold_s(harness) == pytest.approx(1.0)
    harness.core.evaluation("r", evaluation, harness.now)
    assert hold_s(harness) == pytest.approx(REPORT_LEASE_S)
    harness.advance(REPORT_LEASE_S + 1)
    assert hold_s(harness) == 0.0


def test_no_episode_is_granted_on_weights_that_are_too_old_for_a_batch(harness):
    harness.run(max_staleness=1)
    harness.announce("0.1", path="/w/1")
    (attempt,) = harness.lease(1)
    assert [event.version for event in harness.log if isinstance(event, events.Dispatched)] == [Version(0, 0)]
    harness.announce("0.2", path="/w/2")
    assert harness.lease(4) == []
    served(harness, "0.2")
    assert attempt.episode not in {found.episode for found in harness.lease(4)}
    assert [event.version for event in harness.log if isinstance(event, events.Dispatched)][-1] == Version(0, 2)


def test_an_evaluation_of_a_version_that_is_yet_to_be_loaded_waits_for_it(harness):
    harness.run(policy={"endpoints": [A]})
    harness.announce("0.1", path="/w/1")
    evaluation = evaluate(harness)
    assert {attempt.evaluation for attempt in harness.lease(4)} == {""}
    served(harness, "0.1")
    assert {attempt.evaluation for attempt in harness.lease(4)} >= {evaluation}


def test_the_rest_of_an_evaluation_is_cancelled_once_its_version_is_not_served_any_more(harness):
    harness.run()
    harness.announce("0.1", path="/w/1")
    served(harness, "0.1")
    evaluation = evaluate(harness, deadline_s=1000.0)
    harness.announce("0.2", path="/w/2")
    served(harness, "0.2")
    report = harness.core.evaluation("r", evaluation, harness.now)
    assert (report.finished, report.done, report.wanted) == (True, 0, 2)


def test_a_name_of_several_servers_is_refused_where_it_is_not_looked_up():
    name = "dns+http://vllm:8000"
    for policy in ({"agents": {"x": {"endpoints": [name]}}}, {"scorers": {"ref": {"endpoints": [name], "model": "m"}}}):
        with pytest.raises(InvalidRunSpec, match="is a DNS name of several servers"):
            parse_run_spec({"name": "r", "policy": policy})

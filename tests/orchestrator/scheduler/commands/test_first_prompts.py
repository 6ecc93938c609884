"""Groups whose members were shown different first prompts."""

from __future__ import annotations

import pytest

from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.state.run import MIN_UNUSABLE
from tests.orchestrator.scheduler.harness import Harness, codes

COMPARING = {"group_size": 4, "batch_size": 4, "max_staleness": 0}


def finish_two(harness: Harness, first: str = "a", second: str = "b") -> str:
    """Lease a group of four and finish two members with these fingerprints; returns the group's id."""
    attempts = harness.lease(4)
    harness.finish(attempts[0], first_prompt=first)
    harness.finish(attempts[1], first_prompt=second)
    return attempts[0].group


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "none"])
def test_a_group_is_retired_at_its_second_member_if_their_first_prompts_differ(harness, estimator):
    harness.run(estimator={"name": estimator}, **COMPARING)
    group = finish_two(harness)
    assert harness.retired() == {group: "prompts-differ"}
    assert [cancel.reason for cancel in harness.heartbeat().cancels] == ["prompts-differ"] * 2
    assert harness.events_of(events.MemberAdded) == []
    assert harness.status().in_flight == 1, "another was admitted with its credit"


def test_the_reason_names_the_environment(harness):
    harness.run(estimator={"name": "grpo"}, **COMPARING)
    finish_two(harness)
    (reason,) = [reason for reason in harness.empty().reasons if reason.code == "prompts-differ"]
    assert reason.message.startswith(
        "Since the last batch 1 group of game:A had members with different first prompts for the same seed. They were "
        "retired"
    )
    assert reason.facts == {"environment": "game:A", "groups": 1}
    assert harness.status().selected["prompts_differ"] == 1


@pytest.mark.parametrize("estimator", ["reinforce", "rebn", "reinforce_pp"])
def test_an_estimator_that_compares_nothing_is_served_such_groups_and_the_reason_says_so(harness, estimator):
    harness.run(estimator={"name": estimator}, **COMPARING)
    group = finish_two(harness)
    (reason,) = [reason for reason in harness.empty().reasons if reason.code == "prompts-differ"]
    assert "They are served" in reason.message
    for attempt in harness.lease(0, holding=[]) + harness.lease(4, holding=[]):
        harness.finish(attempt, first_prompt="c")
    assert harness.batch().groups == [group]


def test_the_spec_may_allow_different_first_prompts(harness):
    harness.run(estimator={"name": "grpo"}, first_prompts="any", **COMPARING)
    finish_two(harness)
    assert harness.retired() == {}
    assert "prompts-differ" not in codes(harness.empty())
    assert "prompts_differ" not in harness.status().selected


@pytest.mark.parametrize(("first", "second"), [("a", "a"), ("", "b"), ("a", ""), ("", "")])
def test_equal_and_unknown_first_prompts_do_not_differ(harness, first, second):
    harness.run(estimator={"name": "grpo"}, **COMPARING)
    finish_two(harness, first, second)
    assert harness.retired() == {}


def test_a_failed_member_shows_its_first_prompt_too(harness):
    harness.run(estimator={"name": "grpo"}, **COMPARING)
    first, second, *_ = harness.lease(4)
    harness.finish(first, "failed", first_prompt="a")
    harness.finish(second, first_prompt="b")
    assert harness.retired() == {first.group: "prompts-differ"}


def test_a_restart_knows_the_first_prompts_of_open_groups(harness):
    harness.run(estimator={"name": "grpo"}, **COMPARING)
    first, second, *_ = harness.lease(4)
    harness.finish(first, first_prompt="a")
    harness.restart()
    harness.restart(harness.restored(harness.core.snapshot()))
    harness.finish(second, first_prompt="b")
    assert harness.retired() == {first.group: "prompts-differ"}


def test_a_run_that_makes_only_incomparable_groups_is_slowed_down(harness):
    harness.checked = False
    harness.run(estimator={"name": "grpo"}, group_size=2, batch_size=2, max_staleness=0)
    for _ in range(MIN_UNUSABLE + 1):
        first, second = harness.lease(2)
        harness.finish(first, first_prompt="a")
        harness.finish(second, first_prompt="b")
    assert harness.lease(2) == []

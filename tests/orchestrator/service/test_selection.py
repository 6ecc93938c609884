"""Selection over HTTP: filters of pulls, the selection in a batch's manifest, and its state after a restart."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.batch.batch import Batch
from headrace.batch.manifest import BatchSelection
from headrace.estimators import ESTIMATORS, Estimator
from headrace.selection import SELECTION_RULES, SelectionRule
from headrace.wire import messages
from tests.orchestrator.serving import Api, orchestrator, record_for, submission


async def test_the_manifest_states_the_selection_also_after_a_restart(tmp_path):
    async with orchestrator(tmp_path) as api:
        await api.create_run(
            environments=[{"id": "test:Echo", "tags": ["easy"]}, {"id": "test:Echo", "tags": ["hard"]}],
            group_size=1,
            batch_size=2,
            max_staleness=8,
            max_uses=2,
            selection={"order": "prioritized", "exponent": 2},
            bin_tokens=1000,
        )
        await api.play(free=18)
        batch = await api.pull(tags=["hard"], request="hard")
        assert isinstance(batch, Batch)
        batch.verify()
        assert batch.manifest.selection == BatchSelection(order="prioritized", tags=["hard"])
        assert {tuple(group.task.tags) for group in batch.manifest.groups} == {("hard",)}
        assert (batch.manifest.bin_tokens, batch.manifest.counts.bins) == (1000, 1)
        reply = await set_priorities(api, {batch.manifest.groups[0].id: 3.0, "none": 1.0})
        assert (reply.set, reply.over) == (1, ["none"])
        selected = (await api.ask("GET", "/v1/runs/run"))["selected"]
        assert selected == {"prioritized": 2, "filtered": 2}

    async with orchestrator(tmp_path) as api:
        assert (await api.ask("GET", "/v1/runs/run"))["selected"] == selected
        again = await api.pull(tags=["hard"], request="hard")
        assert isinstance(again, Batch)
        assert again.id == batch.id


async def set_priorities(api: Api, priorities: dict[str, float]) -> messages.PrioritiesReply:
    request = messages.PrioritiesRequest(priorities=priorities)
    return msgspec.convert(await api.ask("POST", "/v1/runs/run/priorities", request), messages.PrioritiesReply)


async def test_priorities_of_another_order_are_refused(api: Api):
    await api.create_run()
    request = messages.PrioritiesRequest(priorities={"g": 1.0})
    problem = await api.ask("POST", "/v1/runs/run/priorities", request, status=409)
    assert problem["hint"] == "Create the run with selection = {'order': 'prioritized'}."


async def test_a_partial_group_is_served_although_its_worker_never_answers(api: Api):
    await api.create_run(group_size=2, batch_size=2, max_staleness=0, partial_after_s=0.2, attempt_lease_s=0.4)
    attempts = await api.lease(free=2)
    (result,) = await api.submit(submission([(attempts[0], record_for(attempts[0]))]))
    assert result.verdict == "accepted"
    batch = await api.pull(wait_s=30)
    assert isinstance(batch, Batch)
    (group,) = batch.manifest.groups
    assert (group.expected, group.actual, group.complete) == (2, 1, False)
    (listed,) = (await api.ask("GET", "/v1/runs/run/trajectories?status=cancelled"))["trajectories"]
    assert (listed["episode"], listed["failure"]["kind"]) == (attempts[1].episode, "partial")


async def test_an_estimator_that_fails_ends_the_pull_and_is_a_reason_until_it_works(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ESTIMATORS, "own", Estimator(lambda inputs: 1 / 0))
    await api.create_run(group_size=1, batch_size=1, estimator={"name": "own"})
    await api.play(free=1)
    request = {"learner": "learner", "session": "one", "request": "r"}
    problem = await api.ask("POST", "/v1/runs/run/pull", request, status=500)
    assert (problem["code"], problem["estimator"]) == ("estimator-failed", "own")
    assert problem["detail"] == "Estimator 'own' raised ZeroDivisionError: division by zero."
    reasons = (await api.ask("GET", "/v1/runs/run"))["reasons"]
    assert next(reason["code"] for reason in reasons) == "estimator-failing"
    monkeypatch.setitem(ESTIMATORS, "own", Estimator(lambda inputs: inputs.returns))
    assert isinstance(await api.pull(request="r"), Batch)
    reasons = (await api.ask("GET", "/v1/runs/run"))["reasons"]
    assert "estimator-failing" not in [reason["code"] for reason in reasons]


@pytest.mark.parametrize(
    ("rule", "detail"),
    [
        (SelectionRule(lambda groups: 1 / 0), "raised ZeroDivisionError: division by zero."),
        (
            SelectionRule(lambda groups: groups.drawn(), lambda priority, exponent: 0.0),
            "returned the weight 0.0 for priority 1 and exponent 1, which is not a number above 0 and up to 1e+60.",
        ),
    ],
    ids=["order", "weight"],
)
async def test_a_selection_rule_that_fails_ends_the_pull_and_is_a_reason_until_it_works_also_after_a_restart(
    rule: SelectionRule, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SELECTION_RULES, "own", rule)
    async with orchestrator(tmp_path) as api:
        await api.create_run(group_size=1, batch_size=1, selection={"order": "own"})
        await api.play(free=1)
        await refused(api, detail)
    async with orchestrator(tmp_path) as api:
        await refused(api, detail)
    monkeypatch.setitem(SELECTION_RULES, "own", SelectionRule(lambda groups: groups.drawn()))
    async with orchestrator(tmp_path) as api:
        assert isinstance(await api.pull(request="r"), Batch)
        assert "selection-rule-failing" not in await reason_codes(api)


async def refused(api: Api, detail: str) -> None:
    """Pull, and expect that the run's own selection rule fails."""
    request = {"learner": "learner", "session": "one", "request": "r"}
    problem = await api.ask("POST", "/v1/runs/run/pull", request, status=500)
    assert (problem["code"], problem["rule"]) == ("selection-rule-failed", "own")
    assert problem["detail"] == f"Selection rule 'own' {detail}"
    assert "selection-rule-failing" in await reason_codes(api)


async def reason_codes(api: Api) -> list[str]:
    return [reason["code"] for reason in (await api.ask("GET", "/v1/runs/run"))["reasons"]]

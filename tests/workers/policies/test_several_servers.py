"""Policies with several servers, over real HTTP: a turn that fails at one is retried at another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from headrace.errors import PolicyFailure, Unavailable
from headrace.wire.messages import PolicyServersReply, PolicyServerStatus
from headrace_workers.policies import Policy, ServedPolicies
from headrace_workers.policies import http_policies as served_module
from headrace_workers.policies import probes as watching_module
from headrace_workers.policies import router as router_module
from headrace_workers.policies import server_client as server_module
from headrace_workers.policies import server_list as following_module
from headrace_workers.policies.pausable_deadline import Deadline
from headrace_workers.policies.server_pools import STALE_S, ManagedPool
from tests.workers.engine import DROP, Engine, completion, serving
from tests.workers.fakes import Clock
from tests.workers.policies.test_one_server import REQUEST, fine, raw, reply

Answer = Any


@asynccontextmanager
async def several(*answers: Answer) -> AsyncIterator[tuple[list[Engine], Policy, ServedPolicies]]:
    """A policy behind an engine for each answer; an episode of group ``g`` starts at the first one."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving(answer)) for answer in answers]
        policies = ServedPolicies(default_endpoints=[engine.url for engine in engines], clock=Clock())
        stack.push_async_callback(policies.close)
        policy = policies.at([])
        for engine in engines[1:]:
            policies.router.sent(engine.url)  # a little load, so that the first one is chosen first
        yield engines, policy, policies


G09 = {
    "logprob-nan": reply(raw("NaN")),
    "logprob-missing": reply(raw("null")),
    "logprob-infinite": reply(raw("-Infinity")),
    "logprob-positive": reply(raw("0.3")),
    "logprob-out-of-range": reply(raw("-1e308")),
    "made up by vLLM": reply(raw("-9999.0")),
    "logprobs-too-many": reply(raw("-1.0", ids="[1, 2, 3, 4, 5, 6, 7, 8, 9]")),
    "logprobs-too-few": reply(raw("-1.0", ids="[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]")),
    "token-out-of-range": reply(raw("-1.0", ids="[1, 2, 3, 4, 999, 6, 7, 8, 9, 10]")),
    "server-error": reply('{"error": {"message": "Out of range float values"}}', status=500),
    "garbage": reply("<html>"),
    "cut short": reply(raw("-1.0")[:40]),
    "too deep": reply("[" * 100_000),
    "too deep within": reply('{"choices": ' + "[" * 100_000),
    "no ids": lambda engine, body: completion(None, [-0.5]),
    "connection-lost": lambda engine, body: DROP,
}


@pytest.mark.parametrize("name", G09)
async def test_G09_after_a_bad_answer_the_request_goes_to_another_server(name: str) -> None:  # noqa: N802
    async with several(G09[name], fine) as (engines, policy, policies):
        sample = await policy.sample(REQUEST)
        assert sample.token_ids == [66, 261]
        assert [len(engine.request_ids) for engine in engines] == [1, 1]
        assert engines[0].request_ids != engines[1].request_ids
        assert list(sample.servers) == [engine.url for engine in engines]
        first = engines[0].url
        assert policies.stats()[f"policy_failures {first}"] == 1


async def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_ANSWER_BYTES", 10_000)
    async with several(reply(" " * 10_001), fine) as (_, policy, _):
        assert (await policy.sample(REQUEST)).token_ids == [66, 261]
    async with several(reply(" " * 10_001)) as (_, policy, _):
        with pytest.raises(PolicyFailure, match="longer than 10000 bytes") as caught:
            await policy.sample(REQUEST)
    assert (caught.value.kind, caught.value.retryable) == ("unreadable-response", True)


async def test_a_turn_that_fails_at_every_server_has_the_last_failure() -> None:
    async with several(reply("x", status=500), reply(raw("NaN"))) as (engines, policy, _):
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(REQUEST)
        assert (caught.value.kind, caught.value.retryable) == ("logprob-nan", True)
        assert caught.value.extra["servers"] == [engine.url for engine in engines]
        assert [len(engine.request_ids) for engine in engines] == [1, 1]


async def test_a_request_that_no_server_can_take_is_sent_to_one_only() -> None:
    async with several(reply('{"error": {"message": "no"}}', status=400), fine) as (engines, policy, policies):
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(REQUEST)
        assert caught.value.kind == "request-refused"
        assert engines[1].request_ids == []
        assert policies.stats()[f"policy_failures {engines[0].url}"] == 0


async def test_a_model_that_one_server_lacks_is_requested_from_another_and_the_hint_lists_the_models() -> None:
    unknown = reply('{"error": {"message": "The model `tiny` does not exist.", "param": "model"}}', status=404)
    async with several(unknown, fine) as (engines, policy, _):
        assert (await policy.sample(REQUEST)).token_ids == [66, 261]
    async with several(unknown) as (engines, policy, _):
        engines[0].models = [{"id": "qwen"}, {"id": "llama"}]
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(REQUEST)
    assert (caught.value.kind, caught.value.retryable) == ("unknown-model", False)
    assert "llama, qwen" in caught.value.hint


async def test_a_server_that_cannot_be_reached_gets_no_requests_while_another_is_available() -> None:
    async with several(fine, fine) as (engines, _, policies):
        policy = policies.at(["http://127.0.0.1:1", engines[0].url])
        policies.router.sent(engines[0].url)  # so that the other one is chosen first
        samples = [await policy.sample(REQUEST) for _ in range(5)]
        assert {address for sample in samples[1:] for address in sample.servers} == {engines[0].url}
        assert not policies.router.is_available("http://127.0.0.1:1")


async def test_at_a_rate_limit_the_only_server_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "BACKOFF_S", 0.001)

    def busy(engine: Engine, body: dict[str, Any]) -> Any:
        return fine(engine, body) if len(engine.request_ids) > 2 else web.Response(status=429, text="slow down")

    async with several(busy) as (engines, policy, _):
        sample = await policy.sample(REQUEST)
    assert len(set(engines[0].request_ids)) == 3
    assert sample.waiting_s > 0


async def test_a_rate_limit_that_lasts_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "BACKOFF_S", 0.001)
    async with several(reply("slow down", status=429)) as (_, policy, _):
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(msgspec.structs.replace(REQUEST, timeout_s=0.1))
    assert (caught.value.kind, caught.value.retryable) == ("rate-limited", True)


async def test_a_prompt_that_fills_the_context_is_an_overflow_and_max_tokens_is_reduced_to_the_context() -> None:
    async with several(fine) as (engines, policy, _):
        engines[0].models = [{"id": "tiny", "max_model_len": 12}]
        await policy.sample(REQUEST)
        assert engines[0].bodies[-1]["max_tokens"] == 12 - len(REQUEST.prompt)
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(msgspec.structs.replace(REQUEST, prompt=[1] * 12))
    assert caught.value.kind == "context-overflow"
    assert len(engines[0].bodies) == 1


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 8 tokens. However, your prompt contains 9 input tokens",
        "The decoder prompt (length 9) is longer than the maximum model length of 8.",
    ],
)
async def test_vllms_words_for_a_long_prompt_are_understood(said: str) -> None:
    async with several(reply(msgspec.json.encode({"error": {"message": said}}), status=400)) as (_, policy, _):
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(REQUEST)
    assert caught.value.kind == "context-overflow"


# The servers of a run, as the orchestrator tells


class Orchestrator:
    """Answers long polls with the list that it was told."""

    def __init__(self) -> None:
        self.reply: PolicyServersReply | None = None
        self._change = asyncio.Event()

    def tell(self, revision: int, *servers: PolicyServerStatus) -> None:
        self.reply = PolicyServersReply(epoch=1, revision=revision, servers=list(servers))
        self._change.set()
        self._change = asyncio.Event()

    async def list_servers(self, run: str, revision: int, wait_s: float) -> PolicyServersReply:
        if self.reply is None:
            raise Unavailable("nobody there")
        while self.reply.revision == revision:
            await self._change.wait()
        return self.reply


@asynccontextmanager
async def managed_policy(
    orchestrator: Orchestrator, *answers: Answer, clock: Any = None
) -> AsyncIterator[tuple[list[Engine], Policy]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving(answer)) for answer in answers]
        policies = ServedPolicies(default_endpoints=[], clock=clock or Clock(), list_servers=orchestrator.list_servers)
        stack.push_async_callback(policies.close)
        yield engines, policies.at([engine.url for engine in engines], run="r")


@pytest.mark.parametrize("state", ["syncing", "draining", "ejected"])
async def test_servers_that_are_paused_drained_or_ejected_get_no_new_requests(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following_module, "SHORTEST_POLL_S", 0.0)
    orchestrator = Orchestrator()
    async with managed_policy(orchestrator, fine, fine) as (engines, policy), asyncio.timeout(10):
        a, b = (engine.url for engine in engines)
        orchestrator.tell(1, PolicyServerStatus(address=a, state=state), PolicyServerStatus(address=b, state="serving"))
        for number in range(6):
            await policy.sample(msgspec.structs.replace(REQUEST, episode=f"e{number}", group=f"g{number}"))
        assert (len(engines[0].bodies), len(engines[1].bodies)) == (0, 6)
        orchestrator.tell(2, PolicyServerStatus(address=a, state="serving"), PolicyServerStatus(address=b, state=state))
        while not engines[0].bodies:
            await policy.sample(REQUEST)


async def test_a_server_that_joins_or_leaves_a_run_is_heard_of() -> None:
    orchestrator = Orchestrator()
    orchestrator.tell(1)
    async with managed_policy(orchestrator, fine) as (engines, policy), asyncio.timeout(10):
        waits = asyncio.create_task(policy.sample(REQUEST))
        await asyncio.sleep(0)
        orchestrator.tell(2, PolicyServerStatus(address=engines[0].url, state="unknown"))
        assert list((await waits).servers) == [engines[0].url]


async def test_while_the_orchestrator_is_unavailable_the_servers_of_the_spec_are_used() -> None:
    async with managed_policy(Orchestrator(), fine) as (engines, policy), asyncio.timeout(10):
        assert list((await policy.sample(REQUEST)).servers) == [engines[0].url]


async def test_if_no_server_is_available_in_time_the_failure_has_the_reason() -> None:
    orchestrator = Orchestrator()
    async with managed_policy(orchestrator, fine) as (engines, policy), asyncio.timeout(10):
        orchestrator.tell(1, PolicyServerStatus(address=engines[0].url, state="ejected", reason="missed version 0.8"))
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(msgspec.structs.replace(REQUEST, timeout_s=0.05))
    assert (caught.value.kind, caught.value.retryable) == ("no-server", True)
    assert "missed version 0.8" in caught.value.hint


def policy_waits(policy: Policy) -> bool:
    """Return True once a pause of all servers has begun."""
    assert isinstance(policy, served_module.ServedPolicy)
    pool = policy._pool
    assert isinstance(pool, ManagedPool)
    return pool._all_paused_since is not None


class DeadlineChecks:
    """Counts how often a deadline checks whether its time is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        check = Deadline._check

        def counted(deadline: Deadline) -> None:
            self.count += 1
            check(deadline)

        monkeypatch.setattr(Deadline, "_check", counted)

    async def one(self) -> None:
        """Wait for a check, at the time when the deadline would have passed without the pause."""
        while not self.count:
            await asyncio.sleep(0.005)


async def test_a_pause_for_new_weights_counts_against_no_deadline_and_is_waiting_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = DeadlineChecks(monkeypatch)
    clock, orchestrator, resumed = Clock(), Orchestrator(), asyncio.Event()

    async def paused(engine: Engine, body: dict[str, Any]) -> Any:
        orchestrator.tell(2, PolicyServerStatus(address=engine.url, state="syncing", paused_s=0.0))
        await resumed.wait()
        return fine(engine, body)

    async with managed_policy(orchestrator, paused, clock=clock) as (engines, policy), asyncio.timeout(10):
        url = engines[0].url
        orchestrator.tell(1, PolicyServerStatus(address=url, state="serving"))
        task = asyncio.create_task(policy.sample(msgspec.structs.replace(REQUEST, timeout_s=0.3)))
        while not policy_waits(policy):
            await asyncio.sleep(0.005)
        clock.now += 100
        await checks.one()
        assert not task.done()
        orchestrator.tell(3, PolicyServerStatus(address=url, state="serving", paused_s=100.0))
        resumed.set()
        sample = await task
    assert (sample.paused_s, sample.waiting_s) == (100.0, 100.0)


async def test_a_turn_that_starts_while_all_servers_are_paused_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = DeadlineChecks(monkeypatch)
    clock, orchestrator = Clock(), Orchestrator()
    async with managed_policy(orchestrator, fine, clock=clock) as (engines, policy), asyncio.timeout(10):
        url = engines[0].url
        orchestrator.tell(1, PolicyServerStatus(address=url, state="syncing"))
        task = asyncio.create_task(policy.sample(msgspec.structs.replace(REQUEST, timeout_s=0.2)))
        while not policy_waits(policy):
            await asyncio.sleep(0.005)
        clock.now += 50
        await checks.one()
        assert not task.done()
        assert engines[0].bodies == []
        orchestrator.tell(2, PolicyServerStatus(address=url, state="serving", paused_s=50.0))
        sample = await task
    assert (sample.paused_s, sample.waiting_s) == (50.0, 50.0)


async def test_a_pause_that_a_restarted_orchestrator_counts_again_is_counted_once() -> None:
    clock = Clock()
    pool = ManagedPool("r", [], clock)
    pool.update(
        PolicyServersReply(
            epoch=1, revision=1, servers=[PolicyServerStatus(address="a", state="syncing", paused_s=5.0)]
        )
    )
    clock.now += 2
    assert pool.paused_s("a") == 7.0
    pool.update(
        PolicyServersReply(
            epoch=2, revision=9, servers=[PolicyServerStatus(address="a", state="syncing", paused_s=0.5)]
        )
    )
    assert pool.paused_s("a") == 7.0
    clock.now += 1
    pool.update(
        PolicyServersReply(
            epoch=2, revision=10, servers=[PolicyServerStatus(address="a", state="serving", paused_s=1.5)]
        )
    )
    assert pool.paused_s("a") == 8.0


async def test_a_pause_without_an_update_for_a_while_counts_as_ended() -> None:
    clock = Clock()
    pool = ManagedPool("r", [], clock)
    pool.update(PolicyServersReply(epoch=1, revision=1, servers=[PolicyServerStatus(address="a", state="syncing")]))
    clock.now += STALE_S + 1
    assert pool.addresses() == []
    pool.mark_unreachable()
    assert pool.addresses() == ["a"]
    assert (pool.paused_s("a"), pool.all_paused_s()) == (STALE_S, STALE_S + 1)


async def test_a_suspended_server_returns_when_it_answers_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching_module, "INTERVAL_S", 0.005)
    monkeypatch.setattr(router_module, "FIRST_SUSPENSION_S", 0.0)
    monkeypatch.setattr(router_module, "LONGEST_SUSPENSION_S", 0.0)
    async with several(reply("x", status=500), fine) as (engines, policy, policies), asyncio.timeout(10):
        bad = engines[0]
        bad.healthy = False
        while policies.router.is_available(bad.url):
            await policy.sample(msgspec.structs.replace(REQUEST, episode=f"e{len(bad.bodies)}", group="g"))
        suspensions = policies.router.server(bad.url).suspensions
        while policies.router.server(bad.url).suspensions < suspensions + 3:
            await asyncio.sleep(0.005)  # each probe that fails puts it out for longer
        bad.healthy, bad.answer = True, fine
        while not policies.router.is_available(bad.url):
            await asyncio.sleep(0.005)
        asked = len(bad.bodies)
        while len(bad.bodies) == asked:
            await policy.sample(msgspec.structs.replace(REQUEST, episode="fresh", group="fresh"))
            policies.router.sent(engines[1].url)  # until the other one has more than its share


async def test_open_requests_of_a_silent_server_that_fails_its_probes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching_module, "INTERVAL_S", 0.005)
    monkeypatch.setattr(watching_module, "SILENT_S", -1.0)

    async def never(engine: Engine, body: dict[str, Any]) -> Any:
        engine.healthy = False
        await asyncio.Event().wait()

    async with several(never, fine) as (engines, policy, policies), asyncio.timeout(10):
        sample = await policy.sample(REQUEST)
        assert list(sample.servers) == [engine.url for engine in engines]
        await engines[0].aborted.wait()
        assert not policies.router.is_available(engines[0].url)


async def test_open_requests_of_an_ejected_server_move_once_another_one_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server whose load failed, and which delays requests until it has known weights."""
    monkeypatch.setattr(following_module, "SHORTEST_POLL_S", 0.0)
    asked = asyncio.Event()

    async def delayed(engine: Engine, body: dict[str, Any]) -> Any:
        asked.set()
        await asyncio.Event().wait()

    orchestrator = Orchestrator()
    async with managed_policy(orchestrator, delayed, fine) as (engines, policy), asyncio.timeout(10):
        a, b = (engine.url for engine in engines)
        orchestrator.tell(
            1, PolicyServerStatus(address=a, state="serving"), PolicyServerStatus(address=b, state="syncing")
        )
        turn = asyncio.create_task(policy.sample(REQUEST))
        await asked.wait()
        orchestrator.tell(
            2, PolicyServerStatus(address=a, state="ejected"), PolicyServerStatus(address=b, state="syncing")
        )
        done, _ = await asyncio.wait([turn], timeout=0.1)
        assert not done, "there is nowhere else to go"
        orchestrator.tell(
            3, PolicyServerStatus(address=a, state="ejected"), PolicyServerStatus(address=b, state="serving")
        )
        assert list((await turn).servers) == [a, b]
        await engines[0].aborted.wait()


async def test_without_another_server_a_silent_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching_module, "INTERVAL_S", 0.005)
    monkeypatch.setattr(watching_module, "SILENT_S", -1.0)
    given_up = asyncio.Event()

    async def late(engine: Engine, body: dict[str, Any]) -> Any:
        engine.healthy = False
        await given_up.wait()
        return fine(engine, body)

    async with several(late) as (engines, policy, policies), asyncio.timeout(10):
        turn = asyncio.create_task(policy.sample(REQUEST))
        while policies.router.is_available(engines[0].url):
            await asyncio.sleep(0.005)
        given_up.set()
        assert (await turn).token_ids == [66, 261]
        assert policies.router.is_available(engines[0].url)

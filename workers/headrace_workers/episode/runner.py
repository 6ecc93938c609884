"""The runner of one attempt of an episode, from reset to record.

* Every way to end gives one record; a fault of Headrace becomes an infrastructure failure. The orchestrator validates
  the record.
* Terminated wins over truncated; the end of a budget is a truncation, the end of a deadline a failure. A prompt too
  long for the engine counts as the end of a budget.
* Working time is sampling and environment time; waits, also for a sandbox, do not count. Pauses for new weights count
  against no deadline.
* A failure keeps the turns that were completed before it, and the message that led to it.
* A turn that an evaluation's pinned version did not answer ends the episode as ``cancelled``.
* The environment gets the text of the sampled ids up to the first stop string; all ids are stored.
* Each image of an observation is in ``assets`` once, by name; the record holds the names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.assets import AssetData
from headrace.environment import make
from headrace.errors import EnvironmentFailure, EpisodeFailure, InfrastructureFailure, PolicyFailure
from headrace.trajectory import Failure, Message, Status, StopReason, Timing, Trajectory, Version
from headrace.wire.messages import Assignment
from headrace_workers.bounded_calls import BoundedCalls
from headrace_workers.episode.attempt_records import AttemptOutcome, failed, record_of
from headrace_workers.episode.environment_adapter import AGENT, Content, EnvironmentAnswer, tools_of
from headrace_workers.episode.environment_driver import EnvironmentDriver, EnvironmentKinds
from headrace_workers.episode.environment_processes import EnvironmentProcesses
from headrace_workers.episode.environment_threads import EnvironmentThreads
from headrace_workers.episode.error_text import describe_error
from headrace_workers.episode.policy_logprobs import scored_rows
from headrace_workers.episode.run_plan import RunPlan, agent_sampling, turn_sampling
from headrace_workers.episode.segment_builder import AgentTrack, NextPrompt, TurnRecord
from headrace_workers.policies.base import PolicySource, Sample, SampleRequest, one_version
from headrace_workers.sandboxes import EpisodeSandbox, WorkerSandbox

DEADLINE_KINDS = frozenset({"timeout", "environment-timeout"})
"""Failure kinds that the episode's own deadline may have caused, since no call gets more time than the episode has."""

CONTEXT_OVERFLOW = "context-overflow"
"""Failure kind of a prompt too long for the engine. It truncates the episode."""

MAX_ASSET_BYTES = 256 << 20
"""Most bytes of one episode's images: as much as a worker's whole spool by default."""


@dataclass(kw_only=True, slots=True)
class EpisodeTools:
    """The tools shared by all episodes of a worker.

    ``policies`` provides policies by endpoint; ``clock`` is monotonic, in seconds; ``new_id`` makes ids of
    trajectories; ``make_environment`` builds an environment by id; ``sandbox`` runs the programs of environments,
    ``calls`` bounded calls, ``processes`` environments that compute for a long time.
    """

    worker: str
    policies: PolicySource
    threads: EnvironmentThreads
    clock: Callable[[], float]
    new_id: Callable[[], str]
    make_environment: Callable[..., Any] = make
    kinds: EnvironmentKinds = field(default_factory=EnvironmentKinds)
    sandbox: WorkerSandbox = field(default_factory=lambda: WorkerSandbox(""))
    calls: BoundedCalls = field(default_factory=BoundedCalls)
    processes: EnvironmentProcesses = field(default_factory=EnvironmentProcesses)
    sampling_now: int = 0
    """Policy requests that are open now."""


class _EpisodeOver(Exception):
    """Raised to end the episode with a result."""

    def __init__(self, status: Status, reason: StopReason, failure: Failure | None = None) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason: StopReason = reason
        self.failure = failure


class EpisodeRun:
    """One attempt of an episode. Call ``run`` once, then ``close``."""

    def __init__(self, tools: EpisodeTools, assignment: Assignment, plan: RunPlan) -> None:
        self._tools = tools
        self._assignment = assignment
        self._plan = plan
        self._started_at = tools.clock()
        self._driver = EnvironmentDriver(
            assignment.task,
            timeout_s=plan.spec.limits.environment_timeout_s,
            threads=tools.threads,
            kinds=tools.kinds,
            clock=tools.clock,
            sandbox=EpisodeSandbox(tools.sandbox, domain=assignment.run, clock=tools.clock),
            calls=tools.calls,
            processes=tools.processes,
            make_environment=tools.make_environment,
        )
        self._tracks: dict[str, AgentTrack] = {}
        self._terminated: set[str] = set()
        self._truncated: set[str] = set()
        self._messages: list[Message] = []
        self._infos: list[dict[str, Any]] = []
        self._turns = 0
        self._context_tokens = plan.spec.limits.max_context_tokens
        self._servers: dict[str, None] = {}
        self._policy_s = 0.0
        self._policy_waiting_s = 0.0
        self._paused_s = 0.0
        self._step = ""
        self.assets: dict[str, AssetData] = {}
        """The assets that the record refers to, by name."""
        self._assets_bytes = 0
        self.cancel_reason = ""
        """Reason of a cancellation; set it before cancelling the task that runs the episode."""

    async def run(self) -> Trajectory:
        """Run the attempt to its end. Never raises: a cancelled call ends in a record as well."""
        try:
            ended = await self._ended()
            if self._plan.spec.policy.scorers and ended.status in ("finished", "truncated"):
                return self._record_of(await self._scored(self._outcome(ended)))
            return self._record(ended)
        except EpisodeFailure as error:
            return self._record(_EpisodeOver("failed", "failure", self._blamed(error)))
        except asyncio.CancelledError:
            return self._record(_EpisodeOver("cancelled", "cancelled", _cancelled(self.cancel_reason)))
        except Exception as error:  # noqa: BLE001 - a fault of ours is recorded like any other, never lost
            return self._record(_EpisodeOver("failed", "failure", Failure.of(_fault("The worker failed", error))))

    async def _ended(self) -> _EpisodeOver:
        try:
            await self._play()
        except _EpisodeOver as ended:
            return ended
        raise InfrastructureFailure("The episode stopped without an end.", kind="worker-fault", retryable=True)

    async def close(self) -> None:
        """Close the environment. Raises EnvironmentFailure; the finished record does not change."""
        await self._driver.close()

    # The turns of an episode

    async def _play(self) -> None:
        limits = self._plan.spec.limits
        self._begin(await self._driver.reset(self._time_left()))
        while True:
            track = self._due_track()
            if self._turns >= limits.max_turns:
                raise _EpisodeOver("truncated", "max_turns")
            if self._policy_s + self._driver.environment_s > limits.working_time_s:
                raise _EpisodeOver("truncated", "working_time")
            asked = track.prompt()
            room = self._context_tokens - asked.length
            if room < 1:
                raise _EpisodeOver("truncated", "max_tokens")
            await self._turn(track, asked, min(room, self._plan.spec.sampling.max_tokens))

    def _begin(self, seen: EnvironmentAnswer) -> None:
        plan, assignment = self._plan, self._assignment
        self._check_agents()
        for name in self._driver.agents or [AGENT]:
            agent = plan.agent(name, assignment.adapters.get(name, ""))
            sampling = agent_sampling(
                plan, agent, evaluation_temperature=assignment.temperature, seed=assignment.sampling_seed
            )
            tools = tools_of(seen.info, name, self._driver.agents)
            self._tracks[name] = AgentTrack(name, agent, sampling, plan.renderer, tools)
        self._look(seen, over=False)

    def _check_agents(self) -> None:
        """Refuse a spec whose agents are all unknown: it would train an opponent that it means to freeze."""
        named, there = self._plan.agents.keys(), self._driver.agents
        if there is not None and named and not named & set(there):
            raise EnvironmentFailure(
                f"policy.agents names {sorted(named)}, but the environment's agents are {there}.",
                hint="Use the environment's names in policy.agents.",
                kind="unknown-agent",
                retryable=False,
            )

    def _due_track(self) -> AgentTrack:
        agent = self._driver.due()
        if agent is None:
            raise EnvironmentFailure(
                "next_agent is None before any agent acted.", kind="ended-before-start", retryable=False
            )
        if agent in self._terminated or agent in self._truncated:
            raise EnvironmentFailure(
                f"next_agent names {agent!r}, whose episode has ended.", kind="agent-has-ended", retryable=False
            )
        return self._tracks[agent]

    async def _turn(self, track: AgentTrack, asked: NextPrompt, max_tokens: int) -> None:
        index = self._turns
        try:
            sample, policy_s = await self._sample(track, asked, max_tokens)
        except PolicyFailure as error:
            if error.kind != CONTEXT_OVERFLOW:
                raise
            self._context_tokens = asked.length - 1  # the engine's context is smaller than the run's limit
            raise _EpisodeOver("truncated", "max_tokens") from error
        if sample.prompt is not None:
            asked = track.rendered_as(asked, list(sample.prompt))
        if sample.seen is not None:
            asked = asked.as_seen(sample.seen)
            if asked.length + len(sample.token_ids) > self._context_tokens:
                raise _EpisodeOver("truncated", "max_tokens")  # its images have more tokens than there is room for
        said = self._plan.renderer.parse(sample.token_ids) if sample.text is None else sample.text
        action = self._action(said)
        self._messages.append(Message(role="assistant", content=action, agent=track.agent, turn=index))
        parse_action = self._driver.reads_calls
        given = self._plan.renderer.action(sample.token_ids, action) if parse_action else action
        seen = await self._driver.step(given, self._time_left())
        if track.agent not in seen.rewards:
            raise EnvironmentFailure(
                f"step gave no reward for {track.agent}, which acted.", kind="reward-missing", retryable=False
            )
        turn = TurnRecord(
            index=index,
            reward=seen.rewards[track.agent],
            reward_parts=seen.reward_parts.get(track.agent, {}),
            finish_reason=sample.finish_reason,
            said=said if said != action else "",
            tool_calls=seen.tool_calls.get(track.agent, []),
            policy_s=policy_s,
            environment_s=self._driver.last_s,
        )
        track.commit(asked, sample, said, turn)
        self._turns = index + 1
        self._late_rewards(seen, track.agent)
        self._flags(seen)

    def _late_rewards(self, seen: EnvironmentAnswer, actor: str) -> None:
        for name, reward in seen.rewards.items():
            if name != actor:
                self._tracks[name].add_reward(reward, seen.reward_parts.get(name, {}))

    def _flags(self, seen: EnvironmentAnswer) -> None:
        for name, flag in seen.terminated.items():
            if flag:
                self._terminated.add(name)
        for name, flag in seen.truncated.items():
            if flag and not seen.terminated.get(name):
                self._truncated.add(name)
        over = self._driver.due() is None or self._tracks.keys() <= self._terminated | self._truncated
        self._look(seen, over=over)
        if over and self._truncated and not any(self._tracks[name].last_turn for name in self._terminated):
            raise _EpisodeOver("truncated", "environment_truncated")
        if over:
            raise _EpisodeOver("finished", "terminated")

    def _look(self, seen: EnvironmentAnswer, *, over: bool) -> None:
        self._infos.append(seen.info)
        for asset in seen.assets:
            self._keep(asset)
        for name, observation in seen.observations.items():
            self._observe(name, observation, over)
        for name, history in seen.history.items():
            self._tracks[name].replace_history(history)

    def _keep(self, asset: AssetData) -> None:
        if asset.name in self.assets:
            return
        self._assets_bytes += len(asset.data)
        if self._assets_bytes > MAX_ASSET_BYTES:
            raise EnvironmentFailure(
                f"The episode shows more than {MAX_ASSET_BYTES} bytes of images.",
                hint="Encode images (PNG, JPEG), or show fewer.",
                kind="assets-too-large",
                retryable=False,
            )
        self.assets[asset.name] = asset

    def _observe(self, name: str, observation: Content, over: bool) -> None:
        if over and not observation:
            return  # the episode has ended
        message = Message(role="user", content=observation, agent=name)
        self._messages.append(message)
        self._tracks[name].observe(message)

    # One sample

    async def _sample(self, track: AgentTrack, asked: NextPrompt, max_tokens: int) -> tuple[Sample, float]:
        tools, plan, assignment = self._tools, self._plan, self._assignment
        request = SampleRequest(
            id=f"{assignment.episode}-{assignment.attempt}-{self._turns}",
            group=assignment.group,
            episode=assignment.episode,
            model=track.plan.model,
            prompt=asked.token_ids,
            images=[self.assets[name] for name in asked.images],
            messages=track.messages(),
            tools=track.tools,
            text_will_do=bool(assignment.evaluation),
            sampling=turn_sampling(track.sampling, self._turns),
            max_tokens=max_tokens,
            stop=plan.spec.sampling.stop,
            stop_token_ids=plan.renderer.stop_token_ids,
            timeout_s=min(plan.spec.limits.policy_timeout_s, self._time_left()),
            vocab_size=plan.renderer.tokenizer.vocab_size,
            sampling_spec=plan.spec.sampling,
            policy_spec=plan.spec.policy,
            adapter=track.plan.adapter,
            frozen=track.plan.frozen,
        )
        started_at = tools.clock()
        tools.sampling_now += 1
        try:
            policy = tools.policies.at(track.plan.endpoints, run=track.plan.run, protocol=plan.spec.policy.protocol)
            sample = await policy.sample(request)
        except PolicyFailure as failure:
            self._servers.update(dict.fromkeys(failure.extra.get("servers", ())))
            raise
        finally:
            tools.sampling_now -= 1
            took_s = tools.clock() - started_at
            self._policy_s += took_s
        self._policy_s -= sample.waiting_s
        self._policy_waiting_s += sample.waiting_s
        self._paused_s += sample.paused_s
        self._servers.update(dict.fromkeys(sample.servers))
        self._check_pinned(sample)
        return self._with_ids(sample), took_s - sample.waiting_s

    def _with_ids(self, sample: Sample) -> Sample:
        """Add ids encoded from the text to a sample without ids. The server names no version then."""
        if sample.text is None:
            return sample
        ids = self._plan.renderer.encode(sample.text)
        return msgspec.structs.replace(
            sample, token_ids=ids, logprobs=[0.0] * len(ids), versions=one_version(len(ids), Version(0, 0))
        )

    def _check_pinned(self, sample: Sample) -> None:
        pinned = self._assignment.pinned_version
        if not pinned:
            return
        for run in sample.versions:
            if str(run.version) != pinned:
                raise _EpisodeOver(
                    "cancelled",
                    "cancelled",
                    Failure(
                        layer="policy",
                        kind="version-not-pinned",
                        message=f"Turn {self._turns} was answered by version {run.version}, not by {pinned} as pinned.",
                    ),
                )

    def _action(self, said: str) -> str:
        """The action for the environment: the text up to the first stop string."""
        for stop in self._plan.spec.sampling.stop:
            said = said.partition(stop)[0] if stop else said
        return said

    # Deadlines, blame and the record

    def _time_left(self) -> float:
        left_s = self._plan.spec.limits.episode_timeout_s - self._ran_s()
        if left_s <= 0:
            raise self._overdue()
        return left_s

    def _ran_s(self) -> float:
        """Seconds that the attempt has run, without pauses for new weights."""
        return self._tools.clock() - self._started_at - self._paused_s

    def _overdue(self) -> InfrastructureFailure:
        return InfrastructureFailure(
            f"The attempt took longer than its {self._plan.spec.limits.episode_timeout_s:g} s.",
            hint="Raise limits.episode_timeout_s, or find out what it waited for.",
            kind="episode-timeout",
            retryable=True,
        )

    def _blamed(self, error: EpisodeFailure) -> Failure:
        """Add the turn to a failure, or replace it by the episode's deadline if that ended the call."""
        if error.kind in DEADLINE_KINDS and self._ran_s() >= self._plan.spec.limits.episode_timeout_s:
            return Failure.of(self._overdue())
        where = self._step or (f"Turn {self._turns}" if self._tracks else "Reset")
        return msgspec.structs.replace(Failure.of(error), message=f"{where}: {error}")

    async def _scored(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Add the logprobs of the run's scorers to the outcome."""
        assignment, began_at = self._assignment, self._tools.clock()
        self._step = "Scoring"
        segments, assets = await scored_rows(
            outcome.segments,
            self._plan.spec.policy.scorers,
            self._tools.policies,
            attempt=f"{assignment.episode}-{assignment.attempt}",
            timeout_s=min(self._plan.spec.limits.policy_timeout_s, self._time_left()),
        )
        self.assets.update({asset.name: asset for asset in assets})
        took_s = self._tools.clock() - began_at
        timing = outcome.timing
        return msgspec.structs.replace(
            outcome,
            segments=segments,
            assets=[asset.entry for asset in self.assets.values()],
            timing=msgspec.structs.replace(timing, wall_s=timing.wall_s + took_s, waiting_s=timing.waiting_s + took_s),
        )

    def _record(self, ended: _EpisodeOver) -> Trajectory:
        try:
            return self._record_of(self._outcome(ended))
        except Exception as error:  # noqa: BLE001 - a fault of ours is recorded like any other, never lost
            return self._record_of(failed(_fault("The worker could not make the record", error)))

    def _record_of(self, outcome: AttemptOutcome) -> Trajectory:
        tools = self._tools
        return record_of(self._assignment, outcome, trajectory_id=tools.new_id(), worker=tools.worker)

    def _outcome(self, ended: _EpisodeOver) -> AttemptOutcome:
        self._end_turns(ended)
        driver = self._driver
        segments = [segment for track in self._tracks.values() for segment in track.segments()]
        return AttemptOutcome(
            status=ended.status,
            stop_reason=ended.reason,
            failure=ended.failure,
            segments=segments,
            messages=self._messages,
            infos=self._infos,
            assets=[asset.entry for asset in self.assets.values()],
            tokenizer=self._plan.renderer.tokenizer if segments else None,
            timing=Timing(
                wall_s=self._tools.clock() - self._started_at,
                working_s=self._policy_s + driver.environment_s,
                policy_s=self._policy_s,
                environment_s=driver.environment_s,
                waiting_s=driver.waiting_s + self._policy_waiting_s,
            ),
            endpoints=list(self._servers),
            environment_version=driver.version,
        )

    def _end_turns(self, ended: _EpisodeOver) -> None:
        for name, track in self._tracks.items():
            terminated = name in self._terminated
            if ended.status == "finished":
                # The episode is over for all agents; only an agent that was truncated itself counts as truncated.
                terminated = terminated or name not in self._truncated
            truncated = name in self._truncated or ended.status == "truncated"
            track.end_turns(terminated=terminated, truncated=truncated)
            if ended.status == "truncated":
                track.append_unseen(self._context_tokens)
        unplaced = {name: track.early_reward for name, track in self._tracks.items() if track.early_reward}
        if unplaced and self._infos:
            # The agent had no turn that could carry these rewards; report them instead of losing them.
            self._infos[-1]["rewards_without_turn"] = unplaced


def _cancelled(reason: str) -> Failure | None:
    if not reason:
        return None
    return Failure(layer="infrastructure", kind="cancelled", message=reason)


def _fault(what: str, error: Exception) -> InfrastructureFailure:
    return InfrastructureFailure(
        f"{what}: {describe_error(error)}", hint="This is a defect of Headrace.", kind="worker-fault", retryable=True
    )

"""The runner of one attempt of an episode, from reset to record.

* Every attempt ends in one record; a fault of Headrace becomes an infrastructure failure. The orchestrator validates
  the record.
* Terminated wins over truncated; the end of a budget is a truncation, the end of a deadline a failure. A prompt too
  long for the engine counts as the end of a budget.
* At the end of a budget the environment is asked for a grade, which is added to the rewards of the last turns.
* Working time is sampling and environment time; waits, also for a sandbox, do not count. Pauses for new weights do not
  count against any deadline.
* A failure keeps the turns that were completed before it, and the message that led to it.
* A turn sampled by another version than the evaluation's pinned one ends the episode as ``cancelled``.
* The environment gets the text of the sampled ids up to the first stop string; all ids are stored.
* Each image of an observation is in ``assets`` once, by name; the record has the names.
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
from headrace_workers.episode.first_prompt import fingerprint
from headrace_workers.episode.policy_logprobs import score_rows
from headrace_workers.episode.run_plan import RunPlan, agent_sampling, turn_sampling
from headrace_workers.episode.segment_builder import AgentTrack, NextPrompt, TurnRecord
from headrace_workers.policies.base import PolicySource, Sample, SampleRequest, one_version
from headrace_workers.renderers import Tools
from headrace_workers.sandboxes import EpisodeSandbox, WorkerSandbox
from headrace_workers.unicode_text import as_unicode

DEADLINE_KINDS = frozenset({"timeout", "environment-timeout"})
"""Failure kinds that the episode's deadline may have caused, since it limits the time of each call."""

LIMITS = frozenset({"max_turns", "max_tokens", "working_time"})
"""Stop reasons of the run's own limits. The environment was not asked, and may have a grade."""

CONTEXT_OVERFLOW = "context-overflow"
"""Failure kind of a prompt too long for the engine. It truncates the episode."""

MAX_ASSET_BYTES = 256 << 20
"""Limit on bytes of one episode's images: as much as a worker's spool by default."""


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
    """Number of open policy requests."""
    control_tokens: int = 0
    """Control tokens that texts of environments spelled so far."""


class _EpisodeOver(Exception):
    """Raised to end the episode with a result."""

    def __init__(self, status: Status, reason: StopReason, failure: Failure | None = None) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason: StopReason = reason
        self.failure = failure


class EpisodeRun:
    """An attempt of an episode. Call ``run`` once, then ``close``."""

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
        self._first_prompt = ""
        self._context_tokens = plan.spec.limits.max_context_tokens
        self._servers: dict[str, None] = {}
        self._policy_s = 0.0
        self._policy_waiting_s = 0.0
        self._paused_s = 0.0
        self._step = ""
        self.assets: dict[str, AssetData] = {}
        """The assets that the record refers to, by name."""
        self._assets_bytes = 0
        self._control_tokens = 0
        self.cancel_reason = ""
        """Reason of a cancellation; set it before cancelling the task that runs the episode."""

    async def run(self) -> Trajectory:
        """Run the attempt to its end. Never raises: a cancelled call ends in a record as well."""
        try:
            end = await self._run_to_end()
            if self._plan.spec.policy.scorers and end.status in ("finished", "truncated"):
                return self._record_of(await self._with_scores(self._outcome(end)))
            return self._record(end)
        except EpisodeFailure as error:
            return self._record(_EpisodeOver("failed", "failure", self._failure_of(error)))
        except asyncio.CancelledError:
            reason = self.cancel_reason
            failure = Failure(layer="infrastructure", kind="cancelled", message=reason) if reason else None
            return self._record(_EpisodeOver("cancelled", "cancelled", failure))
        except Exception as error:  # noqa: BLE001 - a fault of Headrace is recorded like any other failure
            return self._record(_EpisodeOver("failed", "failure", Failure.of(_fault("The worker failed", error))))

    async def _run_to_end(self) -> _EpisodeOver:
        try:
            await self._run_turns()
        except _EpisodeOver as end:
            if end.reason in LIMITS and self._turns:
                await self._grade()
            return end
        raise InfrastructureFailure("The episode stopped without an end.", kind="worker-fault", retryable=True)

    async def _grade(self) -> None:
        """Add the environment's grade of the state in which a limit ended the episode."""
        self._step = "Grading"
        answer = await self._driver.grade(self._time_left())
        self._step = ""
        for name, reward in answer.rewards.items():
            self._tracks[name].add_reward(reward, answer.reward_parts.get(name, {}))
        if answer.info:
            self._infos[-1]["grade"] = answer.info

    async def close(self) -> None:
        """Close the environment. Raises EnvironmentFailure; the finished record does not change."""
        await self._driver.close()

    # The turns of an episode

    async def _run_turns(self) -> None:
        limits = self._plan.spec.limits
        self._begin(await self._driver.reset(self._time_left()))
        while True:
            track = self._next_track()
            self._first_prompt = self._first_prompt or fingerprint(track.messages(), track.tools)
            if self._turns >= limits.max_turns:
                raise _EpisodeOver("truncated", "max_turns")
            if self._policy_s + self._driver.environment_s > limits.working_time_s:
                raise _EpisodeOver("truncated", "working_time")
            next_prompt = track.prompt()
            room = self._context_tokens - next_prompt.length
            if room < 1:
                raise _EpisodeOver("truncated", "max_tokens")
            await self._turn(track, next_prompt, min(room, self._plan.spec.sampling.max_tokens))

    def _begin(self, answer: EnvironmentAnswer) -> None:
        plan, assignment = self._plan, self._assignment
        self._check_agents()
        for name in self._driver.agents or [AGENT]:
            agent = plan.agent(name, assignment.adapters.get(name, ""))
            sampling = agent_sampling(
                plan, agent, evaluation_temperature=assignment.temperature, seed=assignment.sampling_seed
            )
            tools = tools_of(answer.info, name, self._driver.agents)
            self._tracks[name] = AgentTrack(name, agent, sampling, plan.renderer, tools)
            self._count_control_tokens(tools)
        self._add_observations(answer, over=False)

    def _check_agents(self) -> None:
        """Refuse a spec whose agents are all unknown: an opponent that should be frozen would be trained."""
        in_spec, agents = self._plan.agents.keys(), self._driver.agents
        if agents is not None and in_spec and not in_spec & set(agents):
            raise EnvironmentFailure(
                f"policy.agents names {sorted(in_spec)}, but the environment's agents are {agents}.",
                hint="Use the environment's names in policy.agents.",
                kind="unknown-agent",
                retryable=False,
            )

    def _next_track(self) -> AgentTrack:
        agent = self._driver.next_agent
        if agent is None:
            raise EnvironmentFailure(
                "next_agent is None before any agent acted.", kind="ended-before-start", retryable=False
            )
        if agent in self._terminated or agent in self._truncated:
            raise EnvironmentFailure(
                f"next_agent names {agent!r}, whose episode has ended.", kind="agent-has-ended", retryable=False
            )
        return self._tracks[agent]

    async def _turn(self, track: AgentTrack, next_prompt: NextPrompt, max_tokens: int) -> None:
        index = self._turns
        try:
            sample, policy_s = await self._sample(track, next_prompt, max_tokens)
        except PolicyFailure as error:
            if error.kind != CONTEXT_OVERFLOW:
                raise
            self._context_tokens = next_prompt.length - 1  # the engine's context is smaller than the run's limit
            raise _EpisodeOver("truncated", "max_tokens") from error
        if sample.prompt is not None:
            next_prompt = track.rendered_as(next_prompt, list(sample.prompt))
        if sample.seen is not None:
            next_prompt = next_prompt.as_seen(sample.seen)
            if next_prompt.length + len(sample.token_ids) > self._context_tokens:
                raise _EpisodeOver("truncated", "max_tokens")  # the tokens of its images do not fit into the context
        text = self._plan.renderer.parse(sample.token_ids) if sample.text is None else sample.text
        action = self._action(text)
        self._messages.append(Message(role="assistant", content=action, agent=track.agent, turn=index))
        argument = self._plan.renderer.action(sample.token_ids, action) if self._driver.reads_calls else action
        answer = await self._driver.step(argument, self._time_left())
        if track.agent not in answer.rewards:
            raise EnvironmentFailure(
                f"step returned no reward for {track.agent}, which acted.", kind="reward-missing", retryable=False
            )
        turn = TurnRecord(
            index=index,
            reward=answer.rewards[track.agent],
            reward_parts=answer.reward_parts.get(track.agent, {}),
            finish_reason=sample.finish_reason,
            said=text if text != action else "",
            tool_calls=answer.tool_calls.get(track.agent, []),
            policy_s=policy_s,
            environment_s=self._driver.last_s,
        )
        track.commit(next_prompt, sample, text, turn)
        self._turns = index + 1
        self._add_late_rewards(answer, track.agent)
        self._apply_flags(answer)

    def _add_late_rewards(self, answer: EnvironmentAnswer, actor: str) -> None:
        for name, reward in answer.rewards.items():
            if name != actor:
                self._tracks[name].add_reward(reward, answer.reward_parts.get(name, {}))

    def _apply_flags(self, answer: EnvironmentAnswer) -> None:
        for name, flag in answer.terminated.items():
            if flag:
                self._terminated.add(name)
        for name, flag in answer.truncated.items():
            if flag and not answer.terminated.get(name):
                self._truncated.add(name)
        over = self._driver.next_agent is None or self._tracks.keys() <= self._terminated | self._truncated
        self._add_observations(answer, over=over)
        if over and self._truncated and not any(self._tracks[name].last_turn for name in self._terminated):
            raise _EpisodeOver("truncated", "environment_truncated")
        if over:
            raise _EpisodeOver("finished", "terminated")

    def _add_observations(self, answer: EnvironmentAnswer, *, over: bool) -> None:
        self._infos.append(answer.info)
        for asset in answer.assets:
            self._add_asset(asset)
        for name, observation in answer.observations.items():
            self._observe(name, observation, over)
        for name, history in answer.history.items():
            self._tracks[name].replace_history(history)
            for message in history:
                self._count_control_tokens(message)

    def _count_control_tokens(self, value: Message | Tools) -> None:
        count = self._plan.renderer.count_control_tokens(value)
        self._control_tokens += count
        self._tools.control_tokens += count

    def _add_asset(self, asset: AssetData) -> None:
        if asset.name in self.assets:
            return
        self._assets_bytes += len(asset.data)
        if self._assets_bytes > MAX_ASSET_BYTES:
            raise EnvironmentFailure(
                f"The images of the episode have more than {MAX_ASSET_BYTES} bytes.",
                hint="Encode images (PNG, JPEG), or return fewer.",
                kind="assets-too-large",
                retryable=False,
            )
        self.assets[asset.name] = asset

    def _observe(self, name: str, observation: Content, over: bool) -> None:
        if over and not observation:
            return  # an empty observation after the end has no information
        message = Message(role="user", content=observation, agent=name)
        self._messages.append(message)
        self._tracks[name].observe(message)
        self._count_control_tokens(message)

    # One sample

    async def _sample(self, track: AgentTrack, next_prompt: NextPrompt, max_tokens: int) -> tuple[Sample, float]:
        tools, plan, assignment = self._tools, self._plan, self._assignment
        request = SampleRequest(
            id=f"{assignment.episode}-{assignment.attempt}-{self._turns}",
            group=assignment.group,
            episode=assignment.episode,
            model=track.plan.model,
            prompt=next_prompt.token_ids,
            images=[self.assets[name] for name in next_prompt.images],
            messages=track.messages(),
            tools=track.tools,
            accepts_text=bool(assignment.evaluation),
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
        """Add ids encoded from the text to a sample without ids, for which the server reports no version."""
        if sample.text is None:
            return sample
        text = as_unicode(sample.text)
        ids = self._plan.renderer.encode(text)
        return msgspec.structs.replace(
            sample, text=text, token_ids=ids, logprobs=[0.0] * len(ids), versions=one_version(len(ids), Version(0, 0))
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
                        message=f"Turn {self._turns} was sampled by version {run.version}, not by the pinned {pinned}.",
                    ),
                )

    def _action(self, text: str) -> str:
        """The action for the environment: the text up to the first stop string."""
        for stop in self._plan.spec.sampling.stop:
            text = text.partition(stop)[0] if stop else text
        return text

    # Deadlines and the record

    def _time_left(self) -> float:
        left_s = self._plan.spec.limits.episode_timeout_s - self._run_time_s()
        if left_s <= 0:
            raise self._timeout_failure()
        return left_s

    def _run_time_s(self) -> float:
        """Seconds since the start of the attempt, without pauses for new weights."""
        return self._tools.clock() - self._started_at - self._paused_s

    def _timeout_failure(self) -> InfrastructureFailure:
        return InfrastructureFailure(
            f"The attempt did not end within {self._plan.spec.limits.episode_timeout_s:g} s.",
            hint="Raise limits.episode_timeout_s, or find the cause of the delay.",
            kind="episode-timeout",
            retryable=True,
        )

    def _failure_of(self, error: EpisodeFailure) -> Failure:
        """Add the turn to a failure, or replace the failure if the episode's deadline ended the call."""
        if error.kind in DEADLINE_KINDS and self._run_time_s() >= self._plan.spec.limits.episode_timeout_s:
            return Failure.of(self._timeout_failure())
        where = self._step or (f"Turn {self._turns}" if self._tracks else "Reset")
        return msgspec.structs.replace(Failure.of(error), message=as_unicode(f"{where}: {error}"))

    async def _with_scores(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """Add the logprobs of the run's scorers to the outcome."""
        assignment, started_at = self._assignment, self._tools.clock()
        self._step = "Scoring"
        segments, assets = await score_rows(
            outcome.segments,
            self._plan.spec.policy.scorers,
            self._tools.policies,
            attempt=f"{assignment.episode}-{assignment.attempt}",
            timeout_s=min(self._plan.spec.limits.policy_timeout_s, self._time_left()),
        )
        self.assets.update({asset.name: asset for asset in assets})
        took_s = self._tools.clock() - started_at
        timing = outcome.timing
        return msgspec.structs.replace(
            outcome,
            segments=segments,
            assets=[asset.entry for asset in self.assets.values()],
            timing=msgspec.structs.replace(timing, wall_s=timing.wall_s + took_s, waiting_s=timing.waiting_s + took_s),
        )

    def _record(self, end: _EpisodeOver) -> Trajectory:
        try:
            return self._record_of(self._outcome(end))
        except Exception as error:  # noqa: BLE001 - a fault of Headrace is recorded like any other failure
            return self._record_of(failed(_fault("The worker could not make the record", error)))

    def _record_of(self, outcome: AttemptOutcome) -> Trajectory:
        tools = self._tools
        return record_of(self._assignment, outcome, trajectory_id=tools.new_id(), worker=tools.worker)

    def _outcome(self, end: _EpisodeOver) -> AttemptOutcome:
        self._end_turns(end)
        driver = self._driver
        segments = [segment for track in self._tracks.values() for segment in track.segments()]
        return AttemptOutcome(
            status=end.status,
            stop_reason=end.reason,
            failure=end.failure,
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
            first_prompt=self._first_prompt,
            control_tokens=self._control_tokens,
        )

    def _end_turns(self, end: _EpisodeOver) -> None:
        for name, track in self._tracks.items():
            terminated = name in self._terminated
            if end.status == "finished":
                # The episode is over for all agents; only agents that were truncated themselves count as truncated.
                terminated = terminated or name not in self._truncated
            truncated = name in self._truncated or end.status == "truncated"
            track.end_turns(terminated=terminated, truncated=truncated)
            if end.status == "truncated":
                track.append_unseen(self._context_tokens)
        unplaced = {name: track.early_reward for name, track in self._tracks.items() if track.early_reward}
        if unplaced and self._infos:
            # The agent had no turn to which these rewards could be added.
            self._infos[-1]["rewards_without_turn"] = unplaced


def _fault(message: str, error: Exception) -> InfrastructureFailure:
    return InfrastructureFailure(
        f"{message}: {describe_error(error)}", hint="This is a defect of Headrace.", kind="worker-fault", retryable=True
    )

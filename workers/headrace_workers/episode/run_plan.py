"""The plan of a run's episodes: its spec and values derived from it, computed once per run.

* The renderer and the plans of the agents are made once for all episodes of a run.
* The seed of a turn depends only on the episode's sampling seed and the turn's index.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace

import msgspec

from headrace.errors import InfrastructureFailure
from headrace.runspec import AgentSpec, RunSpec
from headrace.trajectory import PolicyRef, Sampling
from headrace.wire.policy_server import adapter_server_name
from headrace_workers.renderers import Renderer, make_renderer

_TWO_SEEDS = struct.Struct("<QQ")
_WORD = 2**64 - 1

SEED_BITS = 63
"""Engines take seeds as signed 64-bit integers."""


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """The policy of one agent. Without ``endpoints`` those of the worker are used. ``run``: the run whose servers they
    are, managed by the orchestrator; empty for the agent's own servers. ``adapter``: the run's trained adapter, if the
    agent uses it. ``frozen``: true if ``model`` is a frozen adapter. ``temperature``: None for the run's."""

    run: str
    endpoints: tuple[str, ...]
    model: str
    policy: PolicyRef
    train: bool
    temperature: float | None
    adapter: str = ""
    frozen: bool = False

    def with_frozen_adapter(self, adapter: str) -> AgentPlan:
        """Return the plan with a frozen adapter as the model."""
        policy = PolicyRef(base=self.policy.base, adapter=adapter)
        return replace(self, model=adapter_server_name(self.run, adapter), policy=policy, adapter="", frozen=True)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run's spec, and values derived from it."""

    spec: RunSpec
    renderer: Renderer
    default_agent: AgentPlan
    agents: dict[str, AgentPlan]

    def agent(self, name: str, adapter: str = "") -> AgentPlan:
        """The plan of an agent: its own or the default. ``adapter``: the frozen adapter assigned in this group."""
        plan = self.agents.get(name, self.default_agent)
        return plan.with_frozen_adapter(adapter) if adapter else plan


def make_plan(spec: RunSpec) -> RunPlan:
    """Make the plan of a run. It may read and fetch the files of a tokenizer. Raises InfrastructureFailure as
    ``make_renderer`` does, and ``no-stop-token``."""
    policy = spec.policy
    renderer = make_renderer(policy)
    if not renderer.stop_token_ids and not spec.sampling.stop:
        raise InfrastructureFailure(
            f"A turn has no end: the tokenizer {policy.tokenizer!r} has no end-of-turn token, and the run has no stop "
            "string.",
            hint="Set sampling.stop in the run spec, or name eos_token in the model's tokenizer_config.json.",
            kind="no-stop-token",
            retryable=False,
        )
    default_agent = AgentPlan(
        run=spec.name if policy.endpoints else "",
        endpoints=tuple(policy.endpoints),
        model=policy.model,
        policy=PolicyRef(base=policy.base, adapter=policy.adapter),
        train=True,
        temperature=None,
        adapter=policy.adapter or "",
    )
    agents = {
        name: AgentPlan(
            run=default_agent.run if agent.endpoints is None else "",
            endpoints=tuple(agent.endpoints) if agent.endpoints is not None else default_agent.endpoints,
            model=agent.base if agent.base is not None else default_agent.model,
            policy=PolicyRef(base=agent.base or policy.base, adapter=_trained_adapter(agent, policy.adapter)),
            train=agent.train,
            temperature=agent.temperature,
            adapter=_trained_adapter(agent, policy.adapter) or "",
        )
        for name, agent in policy.agents.items()
    }
    return RunPlan(spec=spec, renderer=renderer, default_agent=default_agent, agents=agents)


def _trained_adapter(agent: AgentSpec, adapter: str | None) -> str | None:
    """The run's adapter, if the agent uses the run's policy."""
    return adapter if agent.base is None and agent.endpoints is None else None


def turn_seed(sampling_seed: int, turn: int) -> int:
    """The seed of one turn, 63 bits. The same episode seed and turn give the same seed, on every worker."""
    packed = _TWO_SEEDS.pack(sampling_seed & _WORD, turn)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> (64 - SEED_BITS)


def agent_sampling(plan: RunPlan, agent: AgentPlan, *, evaluation_temperature: float | None, seed: int) -> Sampling:
    """The sampling parameters of an agent in an episode. Its own temperature has priority over the evaluation's."""
    run_temperature = plan.spec.sampling.temperature if evaluation_temperature is None else evaluation_temperature
    temperature = run_temperature if agent.temperature is None else agent.temperature
    spec = plan.spec
    return Sampling(temperature=temperature, top_p=spec.sampling.top_p, seed=seed, logprobs=spec.policy.logprobs)


def turn_sampling(sampling: Sampling, turn: int) -> Sampling:
    """The sampling parameters of one turn: the episode's, with the turn's own seed."""
    return msgspec.structs.replace(sampling, seed=turn_seed(sampling.seed or 0, turn))

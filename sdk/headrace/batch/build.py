"""Building a batch: from the heads of stored trajectories to the body up to its records.

* The same groups give the same bytes.
* Moments, baselines and counts cover rows, each (trajectory, agent) once; returns cover all its turns.

The layout of the body is in :mod:`headrace.batch.body`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.batch.bins import pack_bins
from headrace.batch.body import PER_ROW, offsets_of, pack_head
from headrace.batch.estimator_inputs import AgentEpisodes, GroupInput, collect_agent_episodes
from headrace.batch.manifest import (
    DISPATCH_ORDER,
    BatchCounts,
    BatchEstimator,
    BatchSelection,
    GroupEntry,
    Manifest,
    MomentSet,
)
from headrace.common.formats import SCHEMA
from headrace.estimators import (
    F64,
    NONE,
    Estimate,
    Weighting,
    advantages,
    episode_rewards,
    group_statistics,
    returns_to_go,
    stored_estimator,
)
from headrace.moments import Moments
from headrace.trajectory import Version


class EstimatorSettings(Protocol):
    """The part of ``EstimatorSpec`` that is used here."""

    @property
    def name(self) -> str: ...
    @property
    def gamma(self) -> float: ...
    @property
    def ddof(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def weighting(self) -> Weighting: ...


class ComputedBatch(NamedTuple):
    """Manifest and columns, as computed from the records."""

    manifest: Manifest
    columns: dict[str, npt.NDArray[Any]]


def build_head(
    *,
    batch: str,
    run: str,
    estimator: EstimatorSettings,
    version: Version,
    groups: Sequence[GroupInput],
    selection: BatchSelection = DISPATCH_ORDER,
    bin_tokens: int = 0,
) -> bytes:
    """Encode the body of a batch up to its records; append the members' records in the given order.

    ``version`` is the run's current version. ``bin_tokens``: most tokens of a bin; 0: rows are not packed. Raises
    InvalidRequest for a member that failed, or a row longer than a bin.
    """
    computed = compute(
        batch=batch,
        run=run,
        estimator=estimator,
        version=version,
        groups=groups,
        selection=selection,
        bin_tokens=bin_tokens,
    )
    return pack_head(computed.manifest, computed.columns)


def compute(
    *,
    batch: str,
    run: str,
    estimator: EstimatorSettings,
    version: Version,
    groups: Sequence[GroupInput],
    selection: BatchSelection = DISPATCH_ORDER,
    bin_tokens: int = 0,
) -> ComputedBatch:
    """Compute manifest and columns of these groups. Arguments and errors are those of ``build_head``."""
    by_tokens = estimator.name != NONE and stored_estimator(estimator.name).by_tokens
    agent_episodes = collect_agent_episodes(groups)
    estimate = _estimate(estimator, agent_episodes)
    weighting: Weighting = "token" if by_tokens else estimator.weighting
    heads = [head for group in groups for head, _ in group.members]
    ranges = [_version_ranges(group) for group in groups]
    entries = _group_entries(groups, ranges, agent_episodes, estimate, version)
    bins = pack_bins(agent_episodes.row_tokens, bin_tokens)
    stale = [entry.staleness for entry in entries if entry.low is not None]
    manifest = Manifest(
        schema=SCHEMA,
        batch=batch,
        run=run,
        version=version,
        version_min=min((low for low, _ in chain(*ranges)), default=None),
        version_max=max((high for _, high in chain(*ranges)), default=None),
        staleness_min=min(stale, default=0),
        staleness_max=max(stale, default=0),
        selection=selection,
        bin_tokens=bin_tokens,
        estimator=BatchEstimator(
            name=estimator.name, gamma=estimator.gamma, ddof=estimator.ddof, eps=estimator.eps, weighting=weighting
        ),
        whitening=estimate.whitening,
        counts=BatchCounts(
            rows=len(agent_episodes.row_tokens),
            trajectories=len(heads),
            groups=len(groups),
            turns=len(agent_episodes.row_turns),
            sampled_tokens=int(agent_episodes.experience.tokens[agent_episodes.row_turns].sum()),
            tokens=int(agent_episodes.row_tokens.sum()),
            bins=int(bins.max(initial=-1)) + 1,
        ),
        moments=moment_set(agent_episodes, estimate.returns, None),
        environments=_by_environment(groups, agent_episodes, estimate.returns),
        groups=entries,
        trajectories=[head.id for head in heads],
    )
    columns = _columns(groups, agent_episodes, estimate, weighting) | {"row_bin": bins}
    if estimator.name == NONE:
        del columns["advantages"]
    return ComputedBatch(manifest, columns)


def _columns(
    groups: Sequence[GroupInput], agent_episodes: AgentEpisodes, estimate: Estimate, weighting: Weighting
) -> dict[str, npt.NDArray[Any]]:
    at = agent_episodes.row_turns
    tokens = agent_episodes.experience.tokens[at]
    return {
        "returns": estimate.returns[at],
        "advantages": estimate.advantages[at],
        "turn_weights": tokens.astype(np.float64) if weighting == "token" else np.ones(len(at)),
        "rewards": agent_episodes.experience.rewards[at],
        "turn_tokens": tokens,
        "row_turn_offsets": offsets_of(agent_episodes.row_turn_counts),
        **{name: getattr(agent_episodes, name) for name in PER_ROW if name in AgentEpisodes._fields},
        **_agent_episode_columns(agent_episodes),
        "record_offsets": offsets_of([size for group in groups for _, size in group.members]),
    }


def _agent_episode_columns(agent_episodes: AgentEpisodes) -> dict[str, npt.NDArray[Any]]:
    """Columns that describe the whole agent episode of each row."""
    experience = agent_episodes.experience
    first_turns = agent_episodes.row_turns[offsets_of(agent_episodes.row_turn_counts)[:-1]]
    agent_episode = np.searchsorted(experience.offsets, first_turns, side="right") - 1
    leads = np.zeros(len(agent_episode), np.int64)
    leads[np.unique(agent_episode, return_index=True)[1]] = 1
    return {"row_reward": episode_rewards(experience.rewards, experience.offsets)[agent_episode], "row_leads": leads}


def _estimate(estimator: EstimatorSettings, agent_episodes: AgentEpisodes) -> Estimate:
    experience = agent_episodes.experience
    if estimator.name == NONE:
        returns = returns_to_go(experience.rewards, experience.offsets, estimator.gamma)
        return Estimate(returns, np.zeros_like(returns), group_statistics(experience), None)
    return advantages(
        estimator.name,
        experience,
        gamma=estimator.gamma,
        ddof=estimator.ddof,
        eps=estimator.eps,
        weighting=estimator.weighting,
    )


def _version_ranges(group: GroupInput) -> list[tuple[Version, Version]]:
    return [bounds for head, _ in group.members if (bounds := head.version_range()) is not None]


def _group_entries(
    groups: Sequence[GroupInput],
    ranges: Sequence[Sequence[tuple[Version, Version]]],
    agent_episodes: AgentEpisodes,
    estimate: Estimate,
    version: Version,
) -> list[GroupEntry]:
    cells: list[list[int]] = [[] for _ in groups]
    for cell, (number, _) in enumerate(agent_episodes.cells):
        cells[number].append(cell)
    statistics, entries = estimate.groups, []
    for number, group in enumerate(groups):
        low = min((low for low, _ in ranges[number]), default=None)
        entries.append(
            GroupEntry(
                id=group.id,
                task=group.task,
                expected=group.expected,
                actual=len(group.members),
                complete=len(group.members) >= group.expected,
                single=any(bool(statistics.single[cell]) for cell in cells[number]),
                zero_variance=bool(cells[number]) and all(bool(statistics.zero_variance[c]) for c in cells[number]),
                agents={agent_episodes.cells[cell][1]: statistics.moments(cell) for cell in cells[number]},
                low=low,
                staleness=version.n - low.n if low is not None else 0,
            )
        )
    return entries


def _by_environment(groups: Sequence[GroupInput], agent_episodes: AgentEpisodes, returns: F64) -> dict[str, MomentSet]:
    names = {name: number for number, name in enumerate(dict.fromkeys(group.task.environment for group in groups))}
    of_group = np.array([names[group.task.environment] for group in groups], np.int64)
    of_cell = of_group[np.array([group for group, _ in agent_episodes.cells], np.int64)]
    of_agent_episode = of_cell[agent_episodes.experience.groups]
    return {name: moment_set(agent_episodes, returns, of_agent_episode == number) for name, number in names.items()}


def moment_set(agent_episodes: AgentEpisodes, returns: F64, chosen: npt.NDArray[np.bool_] | None) -> MomentSet:
    """Moments over the rows of the chosen agent episodes, ``chosen`` bool[episodes]; None: all."""
    experience = agent_episodes.experience
    totals = episode_rewards(experience.rewards, experience.offsets)
    at = agent_episodes.row_turns
    if chosen is not None:
        totals = totals[chosen]
        at = at[np.repeat(chosen, np.diff(experience.offsets))[at]]
    return MomentSet(
        returns_by_turn=Moments.of(returns[at]),
        returns_by_token=Moments.of(returns[at], experience.tokens[at]),
        rewards=Moments.of(totals),
    )

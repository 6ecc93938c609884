"""Estimators of advantages, in float64. Definitions: ``docs/estimators.md``.

* Returns are per turn, per agent, with a discount per turn.
* Advantages do not depend on the order of trajectories.
* Statistics of shards merge to those of the whole.
* Constant returns give advantage 0, also with eps = 0.
* A spread within the rounding errors of the rewards counts as none, by the precision that they came in.
* A group of one gets advantage 0 where a group is compared, and is flagged.
* Failed members never count; a group states its expected and its actual size.
* Other packages add estimators by the entry point group ``headrace.estimators``.
* An estimator that raises, or returns another shape or a value that is not finite, is a typed error that names it.

All functions take flat arrays. An *agent episode* is the turns of one agent in one trajectory: contiguous, in the order
of the episode. ``offsets[k] : offsets[k + 1]`` are the turns of agent episode ``k``. In shapes, ``episodes`` counts
agent episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.common.registry import Registry
from headrace.errors import EstimatorFailed, InvalidRequest
from headrace.moments import Moments
from headrace.reward_precision import largest_error, reward_errors

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Weighting = Literal["turn", "token"]
"""The weight of a turn: 1, or the number of its sampled tokens."""

ENTRY_POINT_GROUP = "headrace.estimators"
"""Each entry point of this group names an ``Estimator``; the entry point's name is the estimator's."""

NONE = "none"
"""The estimator of a run without advantages."""


class Experience(NamedTuple):
    """The turns of many agent episodes.

    ``rewards`` f64[turns]; ``tokens`` i64[turns], sampled tokens of each; ``offsets`` i64[episodes + 1];
    ``groups`` i64[episodes], the number of the (group, agent) within which the agent episode is compared;
    ``trained`` bool[turns], true for turns of rows (None: all): the others have returns but are not counted;
    ``expected`` i64[groups], the expected number of agent episodes of each (group, agent) (None: the actual number).

    Failed ones and those without a trained turn must be omitted.
    """

    rewards: F64
    tokens: I64
    offsets: I64
    groups: I64
    trained: Bools | None = None
    expected: I64 | None = None


class GroupStatistics(NamedTuple):
    """Moments of episode rewards, sizes and flags, with one entry per (group, agent).

    ``n``, ``mean``, ``m2`` f64; ``expected``, ``actual`` i64; ``single`` bool: one member; ``zero_variance`` bool: two
    or more members, all with equal reward up to rounding errors.
    """

    n: F64
    mean: F64
    m2: F64
    expected: I64
    actual: I64
    single: Bools
    zero_variance: Bools

    def moments(self, group: int) -> Moments:
        """The moments of one (group, agent)."""
        return Moments(float(self.n[group]), float(self.mean[group]), float(self.m2[group]))


class Estimate(NamedTuple):
    """The result of an estimator.

    ``returns`` and ``advantages`` f64[turns] (0 for turns that are not trained). ``whitening``: the moments with which
    the batch was whitened, or None.
    """

    returns: F64
    advantages: F64
    groups: GroupStatistics
    whitening: Moments | None


class Gae(NamedTuple):
    """The result of generalized advantage estimation.

    ``advantages`` f64, and ``targets`` f64 for the value function (advantage + value). ``bootstrapped_with_zero``
    bool[episodes]: the episode was truncated, and has no bootstrap value.
    """

    advantages: F64
    targets: F64
    bootstrapped_with_zero: Bools


class Inputs(NamedTuple):
    """The argument of an estimator's ``values``.

    ``returns`` f64[turns]; ``totals`` f64[episodes], the episode rewards; ``groups`` with one entry per (group, agent).
    """

    experience: Experience
    returns: F64
    totals: F64
    groups: GroupStatistics
    ddof: int
    eps: float


class Estimator(NamedTuple):
    """An estimator that the service computes.

    ``values`` returns f64[turns], finite for trained turns; the arrays of its argument are read-only. ``whiten``: the
    values are whitened over the batch. ``by_tokens``: whitening is always weighted by tokens.
    ``compares``: the members of a group are compared, so that they must have the same task.
    """

    values: Callable[[Inputs], F64]
    whiten: bool = False
    by_tokens: bool = False
    compares: bool = True


def _returns(inputs: Inputs) -> F64:
    return inputs.returns


def _centred(inputs: Inputs) -> F64:
    return _per_turn(inputs, _centred_rewards(inputs))


def _normalized(inputs: Inputs) -> F64:
    centred, groups = _centred_rewards(inputs), inputs.groups
    sigma = np.sqrt(groups.m2 / np.maximum(groups.n - inputs.ddof, 1.0))[inputs.experience.groups]
    return _per_turn(inputs, np.divide(centred, sigma + inputs.eps, out=np.zeros_like(centred), where=centred != 0.0))


def _leave_one_out(inputs: Inputs) -> F64:
    n = inputs.groups.n
    scale = n / np.maximum(n - 1.0, 1.0)
    return _per_turn(inputs, _centred_rewards(inputs) * scale[inputs.experience.groups])


def _centred_rewards(inputs: Inputs) -> F64:
    """The reward of each agent episode minus the mean of its group, f64[episodes]."""
    index, groups = inputs.experience.groups, inputs.groups
    centred = inputs.totals - groups.mean[index]
    centred[(groups.single | groups.zero_variance)[index]] = 0.0
    return centred


def _per_turn(inputs: Inputs, values: F64) -> F64:
    """The value of each agent episode, repeated for each of its turns, f64[turns]."""
    return np.repeat(values, _lengths(inputs.experience.offsets))


ESTIMATORS = Registry(
    "estimator",
    ENTRY_POINT_GROUP,
    Estimator,
    {
        "reinforce": Estimator(_returns, compares=False),
        "rebn": Estimator(_returns, whiten=True, compares=False),
        "grpo": Estimator(_normalized),
        "dr_grpo": Estimator(_centred),
        "rloo": Estimator(_leave_one_out),
        "reinforce_pp": Estimator(_returns, whiten=True, by_tokens=True, compares=False),
        "reinforce_pp_baseline": Estimator(_centred, whiten=True, by_tokens=True),
    },
)
"""The estimators of Headrace. GAE needs the learner's values, and is a separate function."""

_BUILT_IN = frozenset(ESTIMATORS)


def stored_estimator(name: str) -> Estimator:
    """The estimator of a run that was created with it. Raises EstimatorFailed if its package is gone."""
    try:
        return ESTIMATORS.find(name)
    except InvalidRequest as error:
        raise EstimatorFailed(error.detail, hint=error.hint, estimator=name) from error


"""Names of estimators whose values need no check."""


def returns_to_go(rewards: npt.ArrayLike, offsets: npt.ArrayLike, gamma: float) -> F64:
    """Returns f64[turns]: ``G_t = r_t + gamma * G_{t+1}`` within each agent episode.

    ``rewards`` f64[turns], ``offsets`` i64[episodes + 1]; ``gamma`` is per turn.
    """
    return _discounted_suffix_sums(np.asarray(rewards, np.float64), np.asarray(offsets, np.int64), gamma)


def episode_rewards(rewards: npt.ArrayLike, offsets: npt.ArrayLike) -> F64:
    """The undiscounted sum of rewards of each agent episode, f64[episodes].

    ``rewards`` f64[turns], ``offsets`` i64[episodes + 1].
    """
    bounds = np.asarray(offsets, np.int64)
    agent_episode = np.repeat(np.arange(len(bounds) - 1), _lengths(bounds))
    return _sums(agent_episode, np.asarray(rewards, np.float64), len(bounds) - 1)


def group_statistics(experience: Experience) -> GroupStatistics:
    """Moments of episode rewards within each (group, agent), with sizes and flags."""
    totals = episode_rewards(experience.rewards, experience.offsets)
    return _group_statistics(experience, totals, largest_error(experience.rewards, experience.offsets))


def advantages(
    name: str,
    experience: Experience,
    *,
    gamma: float,
    ddof: int = 0,
    eps: float = 1e-9,
    weighting: Weighting = "turn",
) -> Estimate:
    """The advantages of the estimator with that name.

    ``gamma`` is per turn. ``ddof`` and ``eps`` apply to every division by a spread, ``weighting`` to whitening;
    estimators that always weight by tokens override it. Raises InvalidRequest for an unknown estimator, and for ddof 1
    with token weighting; EstimatorFailed for one of another package that fails.
    """
    estimator = ESTIMATORS.find(name)
    if estimator.by_tokens:
        weighting = "token"
    if weighting == "token" and ddof and estimator.whiten:
        raise InvalidRequest(
            f"{name} with token weighting takes ddof 0, not {ddof}.", hint="Token counts are weights, not samples."
        )
    returns = returns_to_go(experience.rewards, experience.offsets, gamma)
    totals = episode_rewards(experience.rewards, experience.offsets)
    error_bound = largest_error(experience.rewards, experience.offsets)
    groups = _group_statistics(experience, totals, error_bound)
    trained = experience.trained
    if trained is not None and trained.all():
        trained = None  # as without the array, which spares a copy for each use
    values = _values(name, estimator, Inputs(experience, returns, totals, groups, ddof, eps), trained)
    whitening = None
    if estimator.whiten:
        weights = experience.tokens if weighting == "token" else None
        whitening = _moments(values, weights, trained)
        values = _whitened(values, whitening, ddof, eps, _smallest_error(experience, whitening.std(), error_bound))
    served = values.copy() if trained is None else np.where(trained, values, 0.0)
    return Estimate(returns, served, groups, whitening)


def _values(name: str, estimator: Estimator, inputs: Inputs, trained: Bools | None) -> F64:
    """The values of an estimator, f64[turns], finite in float32 for the trained turns. Raises EstimatorFailed."""
    if name in _BUILT_IN:
        return estimator.values(inputs)
    hint = "Correct the estimator, or create a run with another one."
    try:
        values = np.asarray(estimator.values(_read_only(inputs)), np.float64)
    except (Exception, SystemExit) as error:
        raise EstimatorFailed(
            f"Estimator {name!r} raised {type(error).__name__}: {error}.", hint=hint, estimator=name
        ) from error
    turns = len(inputs.returns)
    if values.shape != (turns,):
        raise EstimatorFailed(
            f"Estimator {name!r} returned an array of shape {values.shape}, not ({turns},), one value for each turn.",
            hint=hint,
            estimator=name,
        )
    is_wrong = ~(np.abs(values) <= np.finfo(np.float32).max)
    wrong = np.flatnonzero(is_wrong if trained is None else is_wrong & trained)
    if len(wrong):
        raise EstimatorFailed(
            f"Estimator {name!r} returned {values[wrong[0]]:g} for turn {wrong[0]} of {turns}, which is not a finite "
            "number of float32.",
            hint=hint,
            estimator=name,
        )
    return values


def _read_only(inputs: Inputs) -> Inputs:
    """The inputs with views of their arrays that an estimator cannot change."""
    experience = inputs.experience._replace(**_views(inputs.experience))
    groups = inputs.groups._replace(**_views(inputs.groups))
    return inputs._replace(experience=experience, groups=groups, **_views(inputs, "returns", "totals"))


def _views(values: Experience | GroupStatistics | Inputs, *names: str) -> dict[str, Any]:
    views = {}
    for name in names or values._fields:
        array = getattr(values, name)
        if array is not None:
            views[name] = array.view()
            views[name].flags.writeable = False
    return views


def gae_turn(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    offsets: npt.ArrayLike,
    *,
    gamma_per_turn: float,
    lambda_per_turn: float,
    terminated: npt.ArrayLike,
    bootstrap_values: npt.ArrayLike | None = None,
) -> Gae:
    """Generalized advantage estimation over turns.

    ``rewards`` f64[turns]; ``values`` f64[turns], the value before each turn; ``offsets`` i64[episodes + 1];
    ``terminated`` bool[episodes]; ``bootstrap_values`` f64[episodes], the value after a truncated one, NaN for none.
    Raises InvalidRequest for arrays of different lengths.
    """
    bounds = np.asarray(offsets, np.int64)
    r, v = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    return _gae(r, v, bounds, gamma_per_turn, lambda_per_turn, terminated, bootstrap_values)


def gae_token(
    rewards: npt.ArrayLike,
    tokens: npt.ArrayLike,
    values: npt.ArrayLike,
    offsets: npt.ArrayLike,
    *,
    gamma_per_token: float,
    lambda_per_token: float,
    terminated: npt.ArrayLike,
    bootstrap_values: npt.ArrayLike | None = None,
) -> Gae:
    """Generalized advantage estimation over sampled tokens; positions that were not sampled are skipped.

    ``rewards`` f64[turns] and ``tokens`` i64[turns], the sampled tokens of each turn: a turn's reward is at its last
    sampled token. ``values`` f64[sampled tokens], in the order of the turns; the other arguments are those of
    ``gae_turn``. Results are per sampled token.
    """
    counts = np.asarray(tokens, np.int64)
    if np.any(counts < 1):
        raise InvalidRequest("A turn has no sampled tokens.", hint="Every turn samples at least one token.")
    ends = np.concatenate(([0], np.cumsum(counts)))
    at_tokens = np.zeros(int(ends[-1]))
    at_tokens[ends[1:] - 1] = np.asarray(rewards, np.float64)
    bounds = ends[np.asarray(offsets, np.int64)]
    v = np.asarray(values, np.float64)
    return _gae(at_tokens, v, bounds, gamma_per_token, lambda_per_token, terminated, bootstrap_values)


def _group_statistics(experience: Experience, totals: F64, error_bound: float) -> GroupStatistics:
    index = experience.groups
    count = int(index.max()) + 1 if len(index) else 0
    if experience.expected is not None:
        count = len(experience.expected)
    actual = np.bincount(index, minlength=count)
    n = actual.astype(np.float64)
    at_least_one = np.maximum(n, 1.0)
    # Two passes with the first value of the group as offset: the mean of constant rewards is exact.
    first = np.zeros(count)
    first[index[::-1]] = totals[::-1]
    mean = first + _sums(index, totals - first[index], count) / at_least_one
    deviation = totals - mean[index]
    m2 = _sums(index, deviation * deviation, count)
    flat = _are_flat(experience, np.sqrt(m2 / at_least_one), error_bound)
    expected = actual if experience.expected is None else experience.expected
    return GroupStatistics(n, mean, m2, expected, actual, actual == 1, flat & (actual > 1))


def _are_flat(experience: Experience, spread: F64, error_bound: float) -> Bools:
    """True for each group whose spread is at most the smallest rounding error of its rewards, bool[groups]."""
    close = spread <= error_bound
    if close.any() and spread[close].any():
        error = np.full(len(spread), np.inf)
        np.minimum.at(error, experience.groups, reward_errors(experience.rewards, experience.offsets))
        return spread <= error
    return close


def _smallest_error(experience: Experience, spread: float, error_bound: float) -> float:
    """The smallest rounding error of any agent episode's rewards; 0 for a spread that is larger than any."""
    if not 0.0 < spread <= error_bound:
        return 0.0
    return float(reward_errors(experience.rewards, experience.offsets).min())


def _lengths(offsets: I64) -> I64:
    """The number of turns of each agent episode, i64[episodes]; NumPy's ``diff`` takes twice as long."""
    return offsets[1:] - offsets[:-1]


def _sums(index: I64, values: F64, count: int) -> F64:
    """The sums of values by index, f64[count]."""
    return np.bincount(index, values, count).astype(np.float64, copy=False)


def _moments(values: F64, weights: I64 | None, trained: Bools | None) -> Moments:
    """The moments of the values of the trained turns; None for ``trained``: of all."""
    if trained is None:
        return Moments.of(values, weights)
    return Moments.of(values[trained], None if weights is None else weights[trained])


def _whitened(values: F64, moments: Moments, ddof: int, eps: float, error: float) -> F64:
    """The values as multiples of their standard deviation; 0 for a spread within ``error``."""
    if moments.is_constant(error):
        return np.zeros_like(values)
    return (values - moments.mean) / (moments.std(ddof) + eps)


def _gae(
    rewards: F64,
    values: F64,
    bounds: I64,
    gamma: float,
    lambda_: float,
    terminated: npt.ArrayLike,
    bootstrap_values: npt.ArrayLike | None,
) -> Gae:
    episodes = len(bounds) - 1
    done = np.asarray(terminated, np.bool_)
    after: Any = np.full(episodes, np.nan) if bootstrap_values is None else np.asarray(bootstrap_values, np.float64)
    if len(rewards) != len(values) or len(values) != bounds[-1] or len(done) != episodes or len(after) != episodes:
        raise InvalidRequest(
            f"The lengths of the arrays do not match: {len(rewards)} rewards, {len(values)} values, offsets up to "
            f"{bounds[-1]}, {len(done)} terminated flags and {len(after)} bootstrap values for {episodes} agent "
            "episodes.",
            hint="Give one value per step, and one flag per agent episode.",
        )
    missing = ~done & np.isnan(after)
    after = np.where(done | missing, 0.0, after)
    following = np.append(values[1:], 0.0)
    filled = _lengths(bounds) > 0
    following[bounds[1:][filled] - 1] = after[filled]
    delta = rewards + gamma * following - values
    result = _discounted_suffix_sums(delta, bounds, gamma * lambda_)
    return Gae(result, result + values, missing)


def _discounted_suffix_sums(values: F64, bounds: I64, factor: float) -> F64:
    """``x_t = values_t + factor * x_{t+1}`` within each agent episode, computed backwards for all at once."""
    lengths = _lengths(bounds)
    order = np.argsort(-lengths, kind="stable")
    last = bounds[1:][order] - 1
    # The agent episodes are sorted by length: the first active[k] are longer than k.
    longest = int(lengths.max()) if len(lengths) else 0
    active = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(longest), side="right")
    result = np.empty_like(values)
    carried = np.zeros(len(lengths))
    for k in range(longest):
        m = active[k]
        at = last[:m] - k
        carried = values[at] + factor * carried[:m]
        result[at] = carried
    return result

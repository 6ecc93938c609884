"""Admission by the metrics of engines: step by step, and against simulated engines."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headrace_orchestrator.policy_servers.admission import ZERO_READINGS, Admission, Load, ServerPoll, poll
from tests.orchestrator.policy_servers.engines import Engine, World

IDLE = Load(running=1)
START = 32


class Polls:
    """One server, polled by hand. ``leased`` is the run's limit unless a value is passed."""

    def __init__(self, state: Admission | None = None) -> None:
        self.state = state or Admission()
        self.load = IDLE
        self.poll("serving", IDLE)

    def poll(self, state, reading="no answer", leased=None):
        size = self.state.attainable or 0
        self.state = poll(self.state, {"a": ServerPoll(state, reading)}, size if leased is None else leased)
        return self.state.attainable

    def serve(self, leased=None, **changes):
        """Poll with a new reading, in which counters grow by the passed values."""
        for name in ("completed", "preemptions", "tokens"):
            changes[name] = getattr(self.load, name) + changes.get(name, 0)
        self.load = replace(self.load, **changes)
        return self.poll("serving", self.load, leased)


def test_a_window_grows_by_slow_start_then_by_additive_increase():
    polls = Polls()
    assert [polls.serve(completed=16) for _ in range(3)] == [START + 16, START + 32, START + 48], (
        "one episode for each request"
    )
    before = polls.serve(completed=0)
    assert polls.serve(completed=1000) == before * 1.5, "at most half of the window in a poll"
    cut = polls.serve(running=60, preemptions=60)
    polls.serve()
    sizes = [cut, *(polls.serve(completed=200) for _ in range(3))]
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(steps) - min(steps) <= 1
    assert cut / 16 < steps[0] < cut / 4


def test_a_window_grows_only_while_the_run_fills_its_limit():
    polls = Polls()
    assert polls.serve(completed=100, leased=10) == START
    assert polls.serve(completed=100) > START


def test_a_preemption_cuts_a_window_by_the_preempted_share():
    few, many = Polls(), Polls()
    assert few.serve(running=32, preemptions=1) == pytest.approx(START * 0.9, abs=1)
    assert many.serve(running=32, preemptions=32) == pytest.approx(START * 0.6, abs=1)


def test_a_standing_queue_reduces_a_window_by_its_length_and_a_passing_one_does_not():
    polls = Polls()
    assert polls.serve(running=24, waiting=8) == START
    assert polls.serve(running=32, waiting=0) == START, "the queue passed"
    polls.serve(running=24, waiting=8)
    assert polls.serve(running=24, waiting=8) == 24


def test_a_cut_takes_effect_before_the_next_one():
    polls = Polls()
    cut = polls.serve(running=32, preemptions=8)
    for _ in range(20):
        assert polls.serve(running=32, preemptions=8, leased=32) == cut, "episodes at workers still end"
    assert polls.serve(preemptions=8, leased=cut) == cut, "the last preemption from before the cut took effect"
    assert polls.serve(preemptions=8, leased=cut) < cut


def test_growth_stops_while_the_kv_cache_is_nearly_full():
    polls = Polls()
    assert polls.serve(completed=100, kv_cache_used=0.95) == START
    slow = polls.serve(completed=100, kv_cache_used=0.7)
    assert START < slow <= START + 4, "slow start ends when half of the cache is in use"


def test_a_reading_of_zero_while_tokens_are_generated_is_ignored():
    polls = Polls()
    polls.serve(running=24, waiting=8)
    for _ in range(ZERO_READINGS - 1):
        assert polls.serve(running=0, waiting=0, tokens=50, completed=4) == START
    assert polls.serve(running=24, waiting=8) == 24, "the queue lasted all the time"
    idle = Polls()
    for _ in range(ZERO_READINGS):
        size = idle.serve(running=0, waiting=0, tokens=50, completed=4)
    assert START < size <= START + START / 8, (
        "enough readings of zero count as one without a queue, outside of slow start"
    )


def test_a_server_whose_metrics_do_not_answer_keeps_its_window_and_one_without_metrics_lifts_the_cap():
    polls = Polls()
    grown = polls.serve(completed=16)
    for _ in range(50):
        assert polls.poll("serving") == grown
    assert polls.poll("serving", "none") is None
    assert polls.poll("serving") is None, "the metrics did not answer since"
    assert polls.serve(completed=0) == grown, "it has metrics now"
    assert poll(Admission(), {"a": ServerPoll("serving")}, 0).attainable == START, "not polled successfully yet"
    assert Admission().attainable is None, "no known servers"


def test_a_queue_is_ignored_while_the_server_is_paused_and_shortly_after():
    polls = Polls()
    for _ in range(5):
        polls.load = replace(polls.load, waiting=32, preemptions=polls.load.preemptions + 1)
        assert polls.poll("paused", polls.load) == START
    for _ in range(3):
        assert polls.serve(waiting=32, preemptions=1) == START
    assert polls.serve(waiting=0, completed=8) == START + 8


def test_an_absent_server_counts_nothing_and_a_returning_one_grows_by_slow_start():
    polls = Polls()
    while polls.serve(completed=400) < 200:
        pass
    before = polls.state.attainable
    assert polls.poll("absent") == 1
    polls.load = IDLE
    assert polls.poll("serving", IDLE) == START
    sizes = [polls.serve(completed=400) for _ in range(12)]
    jumps = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(jumps) > 20, "slow start"
    assert max(jump for size, jump in zip(sizes, jumps, strict=False) if size >= 0.75 * before) <= before / 8


def test_counters_of_a_restarted_server_are_not_preemptions():
    polls = Polls()
    polls.serve(preemptions=5, running=1, tokens=9)
    polls.poll("serving", polls.load, leased=1)
    size = polls.state.attainable
    polls.load = Load(running=1, preemptions=3)
    assert polls.poll("serving", polls.load) == size


def test_a_run_always_has_its_floor_and_never_more_than_its_ceiling():
    low = Polls(Admission(floor=4))
    for _ in range(60):
        size = low.serve(running=1, waiting=9, preemptions=9, leased=1)
    assert size == 4
    high = Polls(Admission(ceiling=48))
    for _ in range(20):
        size = high.serve(completed=100)
    assert size == 48


def test_the_limit_of_a_run_is_the_sum_of_its_servers_windows():
    state = Admission()
    for servers in ("a", "ab", "b", ""):
        state = poll(state.keep_only(servers), dict.fromkeys(servers, ServerPoll("serving", IDLE)), 0)
        assert state.attainable == (len(servers) * START or None)


# Simulated engines --------------------------------------------------------------------------------------------

KV_BOUND = {"kv_tokens": 8000}
SEQUENCE_BOUND = {"kv_tokens": 100_000, "max_running": 64}


@pytest.mark.parametrize("engine", [KV_BOUND, SEQUENCE_BOUND, {**SEQUENCE_BOUND, "zero_share": 0.6}], ids=str)
def test_the_limit_converges_near_the_best_concurrency_and_varies_within_a_factor_of_two(engine):
    best_concurrency = 80
    best = World([Engine(**engine)], fixed=best_concurrency)
    world = World([Engine(**engine)])
    for simulation in (best, world):
        simulation.polls(100)
    limits = world.polls(100)
    best.polls(100)
    assert max(limits) <= 2 * min(limits)
    assert best_concurrency / 2 <= sum(limits) / len(limits) <= 1.5 * best_concurrency
    assert world.useful >= 0.8 * best.useful


def test_the_limit_recovers_after_a_server_dies_and_returns():
    world = World([Engine(**SEQUENCE_BOUND), Engine(**SEQUENCE_BOUND)])
    world.polls(100)
    both = world.state.attainable
    world.kill(1)
    world.polls(1)
    assert world.state.attainable <= 0.75 * both
    world.polls(40)
    world.engines[1].up = True
    world.polls(60)
    assert world.state.attainable >= 0.75 * both
    assert world.engines[1].completed > 0.5 * (world.engines[0].completed - world.engines[1].completed) / 3


def test_a_pause_for_weights_does_not_change_the_limit_for_long():
    world = World([Engine(**SEQUENCE_BOUND)])
    before = sum(world.polls(100)[-20:]) / 20
    for _ in range(10):
        world.engines[0].paused = True
        world.polls(2)
        world.engines[0].paused = False
        world.polls(8)
    assert sum(world.history[-20:]) / 20 >= 0.8 * before


def test_a_run_with_few_slots_does_not_grow_windows_beyond_its_use():
    world = World([Engine(**SEQUENCE_BOUND)], slots=20)
    assert max(world.polls(60)) <= START


@settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    engines=st.lists(
        st.builds(
            Engine,
            kv_tokens=st.integers(4000, 20_000),
            max_running=st.integers(16, 200),
            speed=st.floats(20, 300),
            zero_share=st.sampled_from([0.0, 0.0, 0.3, 0.8]),
        ),
        min_size=1,
        max_size=3,
    ),
    turns=st.integers(1, 6),
    output_tokens=st.integers(10, 120),
    env_ticks=st.integers(0, 60),
    seed=st.integers(0, 9),
)
def test_no_engine_is_idle_and_none_is_overloaded(engines, turns, output_tokens, env_ticks, seed):
    world = World(engines, turns=turns, output_tokens=output_tokens, env_ticks=env_ticks, seed=seed)
    assert all(1 <= size < math.inf for size in world.polls(45))
    used_before = world.used
    limits = world.polls(45)
    assert (world.used - used_before) / len(limits) >= 0.25, "average use of each engine's scarcest resource"
    assert sum(engine.preemptions for engine in engines) <= 2 * sum(engine.completed for engine in engines)
    assert max(limits) <= 4 * min(limits)

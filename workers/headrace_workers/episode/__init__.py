"""Attempts of episodes: the environment, the turns, the record."""

from headrace_workers.episode.attempt_records import AttemptOutcome, failed, record_of
from headrace_workers.episode.environment_processes import EnvironmentProcesses
from headrace_workers.episode.environment_threads import EnvironmentThreads
from headrace_workers.episode.run_plan import RunPlan, make_plan, turn_seed
from headrace_workers.episode.runner import EpisodeRun, EpisodeTools

__all__ = [
    "AttemptOutcome",
    "EnvironmentProcesses",
    "EnvironmentThreads",
    "EpisodeRun",
    "EpisodeTools",
    "RunPlan",
    "failed",
    "make_plan",
    "record_of",
    "turn_seed",
]

"""One attempt of an episode: the environment, the turns, the record."""

from headrace_workers.episode.driver import EnvironmentDriver, EnvironmentKinds
from headrace_workers.episode.plan import AgentPlan, RunPlan, make_plan, turn_seed
from headrace_workers.episode.processes import EnvironmentProcesses
from headrace_workers.episode.records import Outcome, failed, record_of
from headrace_workers.episode.runner import Episode, EpisodeTools
from headrace_workers.episode.threads import EnvironmentThreads

__all__ = [
    "AgentPlan",
    "EnvironmentDriver",
    "EnvironmentKinds",
    "EnvironmentProcesses",
    "EnvironmentThreads",
    "Episode",
    "EpisodeTools",
    "Outcome",
    "RunPlan",
    "failed",
    "make_plan",
    "record_of",
    "turn_seed",
]

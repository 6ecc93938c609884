"""Checks of a live policy server: whether rendering, ids and log-probabilities agree."""

from headrace_workers.policy_check import ending, playing, rendering, sampling, serving
from headrace_workers.policy_check.findings import Check, Finding, run_checks
from headrace_workers.policy_check.server import Server
from headrace_workers.policy_check.subject import Subject

CHECKS = (
    Check("server", serving.server, vital=True),
    Check("model", serving.model, vital=True),
    Check("renderer", rendering.renderer),
    Check("vocabulary", rendering.vocabulary),
    Check("template", rendering.template),
    Check("text", rendering.text),
    Check("ids", sampling.ids, vital=True),
    Check("logprobs", sampling.logprobs),
    Check("scores", sampling.scores),
    Check("greedy", sampling.greedy),
    Check("seeds", sampling.seeds),
    Check("several", sampling.several),
    Check("stop token", ending.stop_token),
    Check("stop string", ending.stop_string),
    Check("context", ending.context),
    Check("version", serving.version),
    Check("turns", playing.turns),
    Check("image", playing.image),
    Check("abort", ending.abort),
)
"""All checks, in the order in which they are made: a fault is named by the first check that it breaks."""

__all__ = ["CHECKS", "Finding", "Server", "Subject", "run_checks"]

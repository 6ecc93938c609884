"""Checks of a live policy server: whether rendering, ids and log-probabilities agree."""

from headrace_workers.policy_check import renderer_checks, sample_checks, server_checks, stop_checks, turn_checks
from headrace_workers.policy_check.findings import Check, Finding, run_checks
from headrace_workers.policy_check.requests import Server
from headrace_workers.policy_check.target import Subject

CHECKS = (
    Check("server", server_checks.server, vital=True),
    Check("model", server_checks.model, vital=True),
    Check("renderer", renderer_checks.renderer),
    Check("vocabulary", renderer_checks.vocabulary),
    Check("template", renderer_checks.template),
    Check("text", renderer_checks.text),
    Check("ids", sample_checks.ids, vital=True),
    Check("logprobs", sample_checks.logprobs),
    Check("scores", sample_checks.scores),
    Check("greedy", sample_checks.greedy),
    Check("seeds", sample_checks.seeds),
    Check("several", sample_checks.several),
    Check("stop token", stop_checks.stop_token),
    Check("stop string", stop_checks.stop_string),
    Check("context", stop_checks.context),
    Check("version", server_checks.version),
    Check("turns", turn_checks.turns),
    Check("image", turn_checks.image),
    Check("abort", stop_checks.abort),
)
"""All checks, in the order in which they are made: a fault is named by the first check that it breaks."""

__all__ = ["CHECKS", "Finding", "Server", "Subject", "run_checks"]

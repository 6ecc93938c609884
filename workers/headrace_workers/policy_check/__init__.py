"""Checks that rendering, ids and log-probabilities of a live policy server agree with the renderer."""

from headrace_workers.policy_check import (
    distribution_checks,
    renderer_checks,
    sample_checks,
    server_checks,
    stop_checks,
    turn_checks,
)
from headrace_workers.policy_check.findings import CheckFinding, PolicyCheck, run_checks
from headrace_workers.policy_check.requests import CheckedServer
from headrace_workers.policy_check.target import CheckTarget

CHECKS = (
    PolicyCheck("server", server_checks.server, vital=True),
    PolicyCheck("model", server_checks.model, vital=True),
    PolicyCheck("renderer", renderer_checks.renderer),
    PolicyCheck("vocabulary", renderer_checks.vocabulary),
    PolicyCheck("roles", renderer_checks.roles),
    PolicyCheck("control tokens", renderer_checks.control_tokens),
    PolicyCheck("template", renderer_checks.template),
    PolicyCheck("text", renderer_checks.text),
    PolicyCheck("ids", sample_checks.ids, vital=True),
    PolicyCheck("logprobs", sample_checks.logprobs),
    PolicyCheck("scores", sample_checks.scores),
    PolicyCheck("greedy", sample_checks.greedy),
    PolicyCheck("seeds", sample_checks.seeds),
    PolicyCheck("several", sample_checks.several),
    PolicyCheck("stop token", stop_checks.stop_token),
    PolicyCheck("stop string", stop_checks.stop_string),
    PolicyCheck("context", stop_checks.context),
    PolicyCheck("version", server_checks.version),
    PolicyCheck("sampling", distribution_checks.sampling),
    PolicyCheck("turns", turn_checks.turns),
    PolicyCheck("image", turn_checks.image),
    PolicyCheck("abort", stop_checks.abort),
)
"""All checks, in order: a fault is reported by the first check that fails because of it."""

__all__ = ["CHECKS", "CheckFinding", "CheckTarget", "CheckedServer", "run_checks"]

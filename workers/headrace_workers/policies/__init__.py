"""Policies: clients that sample a turn's tokens."""

from headrace_workers.policies.base import Policy, PolicySource, Sample, SampleRequest, check_sample, one_version
from headrace_workers.policies.http_policies import ServedPolicies
from headrace_workers.policies.in_process import InProcessPolicy, load_in_process_policy

__all__ = [
    "InProcessPolicy",
    "Policy",
    "PolicySource",
    "Sample",
    "SampleRequest",
    "ServedPolicies",
    "check_sample",
    "load_in_process_policy",
    "one_version",
]

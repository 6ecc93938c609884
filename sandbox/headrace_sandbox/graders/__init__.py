"""Grading of untrusted programs by tests that they never see."""

from headrace_sandbox.graders.cases import CallCase, Case, CaseResult, StdioCase, Verdict
from headrace_sandbox.graders.grader import grade
from headrace_sandbox.graders.unit_tests import grade_unit_tests
from headrace_sandbox.graders.verdict_file import grade_by_file, verdict_of

__all__ = [
    "CallCase",
    "Case",
    "CaseResult",
    "StdioCase",
    "Verdict",
    "grade",
    "grade_by_file",
    "grade_unit_tests",
    "verdict_of",
]

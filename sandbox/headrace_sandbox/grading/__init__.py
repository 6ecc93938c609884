"""Grades programs that nobody trusts, from tests that they never see."""

from headrace_sandbox.grading.cases import CallCase, Case, CaseResult, StdioCase, Verdict
from headrace_sandbox.grading.grader import grade
from headrace_sandbox.grading.unittests import grade_unit_tests
from headrace_sandbox.grading.verdictfile import grade_by_file, verdict_of

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

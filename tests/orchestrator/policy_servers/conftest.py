"""Fixtures of the tests of policy servers."""

from __future__ import annotations

from tests.orchestrator.conftest import api, process

__all__ = ["api", "process"]

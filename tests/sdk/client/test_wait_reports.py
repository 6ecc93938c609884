"""Texts about what a pull waits for."""

from __future__ import annotations

from headrace.client.wait_reports import reasons_text
from headrace.wire.messages import Reason


def test_each_reason_is_a_sentence_with_one_mark_at_its_end() -> None:
    reasons = [Reason(code=code, message=code) for code in ("No workers", "All stale.", "Does it answer?")]
    assert reasons_text(reasons) == "No workers. All stale. Does it answer?"
    assert reasons_text([]) == "No reason was given."

"""The kept head and tail of a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_sandbox.host.capture import Capture


@given(st.lists(st.binary(min_size=1, max_size=50)), st.integers(0, 60))
def test_head_and_tail_are_kept_in_bounded_memory(parts: list[bytes], kept_bytes: int) -> None:
    capture = Capture(kept_bytes)
    for part in parts:
        capture.feed(part)
    output, whole = capture.output(), b"".join(parts)
    assert output.total_bytes == len(whole)
    assert whole.startswith(output.head)
    assert whole.endswith(output.tail)
    if len(whole) <= kept_bytes:
        assert (output.head, output.truncated) == (whole, False)
    else:
        assert len(output.head) + len(output.tail) == kept_bytes
        assert output.truncated


def test_text_says_how_much_was_left_out() -> None:
    capture = Capture(4)
    capture.feed(b"ab" + b"." * 100 + b"yz")
    assert capture.output().text == "ab\n[… 100 bytes left out …]\nyz"

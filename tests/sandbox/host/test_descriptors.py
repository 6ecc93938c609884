"""Descriptors are closed together, unless their ownership is released."""

from __future__ import annotations

import os

import pytest

from headrace_sandbox.host.descriptors import Descriptors, is_readable


def test_one_end_of_a_hangup_pair_becomes_readable_when_no_process_holds_the_other() -> None:
    with Descriptors() as owned:
        ours, theirs = owned.hangup_pair()
        copy = os.dup(theirs)
        assert os.read(copy, 1) == b""
        owned.close(theirs)
        assert not is_readable(ours)
        os.close(copy)
        assert is_readable(ours)


def test_a_released_descriptor_stays_open_and_the_others_are_closed() -> None:
    with Descriptors() as owned:
        reads, writes = owned.pipe()
        owned.release(writes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reads)
    os.close(writes)

"""Descriptors of a process."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from headrace.server.descriptors import raise_descriptor_limit


@pytest.fixture
def descriptors() -> Iterator[int]:
    """The hard limit, with a lower soft limit until the test ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_of_this_processs_descriptors_is_raised_to_the_hard_one(descriptors: int):
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] < descriptors
    raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (descriptors, descriptors)

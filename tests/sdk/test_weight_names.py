"""What a server calls its weights, and what that says."""

from __future__ import annotations

import pytest

from headrace.trajectory import Version
from headrace.wire.policy_server import held_before, loading, run_of, version_of, weights_name

SEVEN, EIGHT = Version(0, 7), Version(0, 8)


def test_a_name_says_the_version_to_its_own_run_and_to_whoever_asks_for_nobodys():
    name = weights_name(SEVEN, "math")
    assert (run_of(name), version_of(name, "math"), version_of(name)) == ("math", SEVEN, SEVEN)
    assert version_of(name, "other") is None


def test_without_a_run_a_version_is_whosever_asks():
    assert version_of(weights_name(SEVEN), "math") == SEVEN
    assert version_of("default", "math") == Version(0, 0)


@pytest.mark.parametrize("run", ["math", ""])
def test_while_weights_are_loaded_the_name_is_no_version_and_says_what_was_held_before(run: str):
    name = loading(weights_name(SEVEN, run), weights_name(EIGHT, run))
    assert version_of(name) is version_of(name, "math") is version_of(name, "other") is None
    assert held_before(name) == held_before(loading(name, weights_name(EIGHT, run))) == weights_name(SEVEN, run)


@pytest.mark.parametrize("text", ["", "@", "latest", "math@", "math@1", "0.1@math"])
def test_other_words_are_no_version(text: str):
    assert version_of(text) is None

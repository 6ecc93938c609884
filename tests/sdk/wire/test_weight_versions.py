"""The weight versions that policy servers report."""

from __future__ import annotations

import pytest

from headrace.trajectory import Version
from headrace.wire.policy_server import (
    loading_name,
    name_before_load,
    parse_weight_version,
    run_of_weight_version,
    weight_version_name,
)

SEVEN, EIGHT = Version(0, 7), Version(0, 8)


def test_a_weight_version_is_parsed_for_its_own_run_and_without_a_run():
    name = weight_version_name(SEVEN, "math")
    assert (run_of_weight_version(name), parse_weight_version(name, "math"), parse_weight_version(name)) == (
        "math",
        SEVEN,
        SEVEN,
    )
    assert parse_weight_version(name, "other") is None


def test_a_weight_version_without_a_run_counts_for_every_run():
    assert parse_weight_version(weight_version_name(SEVEN), "math") == SEVEN
    assert parse_weight_version("default", "math") == Version(0, 0)


@pytest.mark.parametrize("run", ["math", ""])
def test_during_a_load_there_is_no_version_but_the_name_before_the_load(run: str):
    name = loading_name(weight_version_name(SEVEN, run), weight_version_name(EIGHT, run))
    assert (
        parse_weight_version(name) is parse_weight_version(name, "math") is parse_weight_version(name, "other") is None
    )
    assert (
        name_before_load(name)
        == name_before_load(loading_name(name, weight_version_name(EIGHT, run)))
        == weight_version_name(SEVEN, run)
    )


@pytest.mark.parametrize("text", ["", "@", "latest", "math@", "math@1", "0.1@math"])
def test_other_text_is_not_a_version(text: str):
    assert parse_weight_version(text) is None

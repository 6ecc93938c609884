"""The files that retention may delete."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.common.ids import new_id
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.retention_rules import FileUse, RetentionRules, removable_files
from headrace_orchestrator.service.storage.group_locations import GroupLocations
from headrace_orchestrator.service.storage.location_index import FileInUse, LocationIndex

NOW = 1_000_000.0
FILES = [FileUse(number, 100, 10, NOW - 1000 + 100 * number) for number in range(1, 6)]
"""Five files of 100 bytes and 10 trajectories, last written 900 to 500 seconds ago."""


def removable(rules: RetentionRules, needed: int = 99) -> list[int]:
    return removable_files(FILES, rules, now_s=NOW, needed=needed)


def test_nothing_is_deleted_unless_a_rule_allows_it():
    assert removable(RetentionRules()) == []
    assert not RetentionRules().deletes


def test_by_age_a_file_goes_when_its_newest_record_is_too_old():
    assert removable(RetentionRules(age_s=750)) == [1, 2]
    assert removable(RetentionRules(age_s=901)) == []


def test_by_count_a_file_goes_when_the_rest_still_reaches_the_number():
    assert removable(RetentionRules(trajectories=30)) == [1, 2]
    assert removable(RetentionRules(trajectories=31)) == [1]


def test_by_bytes_a_file_goes_when_the_rest_still_reaches_the_number():
    assert removable(RetentionRules(size_bytes=300)) == [1, 2]
    assert removable(RetentionRules(size_bytes=301)) == [1]


def test_each_rule_counts_alone():
    assert removable(RetentionRules(age_s=850, size_bytes=300)) == [1, 2]


def test_a_file_that_is_needed_stays_and_so_do_all_files_behind_it():
    assert removable(RetentionRules(age_s=0), needed=3) == [1, 2]
    assert removable(RetentionRules(age_s=0), needed=1) == []


def test_the_current_file_stays():
    assert removable(RetentionRules(age_s=0, trajectories=0, size_bytes=0)) == [1, 2, 3, 4]
    assert removable_files([], RetentionRules(age_s=0), now_s=NOW, needed=99) == []


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 20)), min_size=1, max_size=8),
    st.integers(0, 1500),
    st.integers(0, 150),
    st.integers(1, 9),
)
def test_the_rest_reaches_each_number_and_is_the_newest(sizes, keep_bytes, keep_count, needed):
    files = [FileUse(number, size, count, NOW) for number, (size, count) in enumerate(sizes, 1)]
    retention = RetentionRules(trajectories=keep_count, size_bytes=keep_bytes)
    deleted = removable_files(files, retention, now_s=NOW, needed=needed)
    assert deleted == [file.number for file in files[: len(deleted)]]
    assert all(number < needed for number in deleted)
    remaining = files[len(deleted) :]
    if deleted:
        assert (
            sum(f.size_bytes for f in remaining) >= keep_bytes or sum(f.trajectories for f in remaining) >= keep_count
        )
    assert remaining


def test_files_are_small_in_comparison_with_the_data_that_is_kept():
    assert RetentionRules(age_s=100).file_age_s == 25
    assert RetentionRules().file_age_s is None
    assert RetentionRules(size_bytes=100 << 20).file_bytes(256 << 20) == 25 << 20
    assert RetentionRules(size_bytes=0).file_bytes(256 << 20) == 1 << 20
    assert RetentionRules(age_s=1).file_bytes(256 << 20) == 256 << 20


def test_below_the_bound_of_the_disk_more_than_the_current_file_fits():
    assert RetentionRules(trajectories=1).file_bytes(256 << 20, max_disk_bytes=64 << 20) == 16 << 20
    assert RetentionRules(size_bytes=16 << 20).file_bytes(256 << 20, max_disk_bytes=64 << 20) == 4 << 20
    assert RetentionRules().file_bytes(256 << 20, max_disk_bytes=64 << 20) == 256 << 20


def test_the_search_for_the_oldest_file_in_use_ends_at_the_first_group_in_it():
    index = LocationIndex()
    looked_at: list[int] = []

    class Waiting(GroupLocations):
        @property
        def first_file(self) -> int:
            looked_at.append(super().first_file)
            return looked_at[-1]

    groups = index.groups.setdefault("run", {})
    for number in range(1000):
        groups[str(number)] = Waiting(1)
        groups[str(number)].add(new_id(), Location(3 + number // 100, 64, 8))
    assert index.oldest_in_use(floor=3) == FileInUse(3, "run", "group 0")
    assert len(looked_at) == 1
    assert index.oldest_in_use(floor=2) == index.oldest_in_use() == FileInUse(3, "run", "group 0")

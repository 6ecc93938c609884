"""Compact storage of the locations of a group's records."""

from headrace.common.ids import new_id
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.service.storage.group_locations import GroupLocations

IDS = [new_id(), "chosen-by-a-learner", new_id().upper(), new_id(), "é" * 12]


def test_a_groups_records_come_back_by_their_ids_in_the_order_in_which_they_were_stored() -> None:
    group = GroupLocations(len(IDS))
    records = {id: Location(number + 1, 64 * number, 1000 + number) for number, id in enumerate(IDS)}
    for id, location in records.items():
        group.add(id, location)
    assert list(group) == list(records.items())
    assert list(group.files()) == [location.file for location in records.values()]


def test_a_record_takes_some_30_bytes() -> None:
    group = GroupLocations(1)
    group.add(new_id(), Location(1, 64, 1000))
    assert len(group.packed) < 35

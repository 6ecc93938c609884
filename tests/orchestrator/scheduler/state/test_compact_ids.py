"""Ids in few bytes."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from headrace_orchestrator.scheduler.state.compact_ids import pack, unpack


@given(
    st.lists(
        st.one_of(
            st.uuids().map(str),
            st.uuids().map(lambda id: str(id).upper()),
            st.uuids().map(lambda id: id.hex + "----"),
            st.text(max_size=40),
        ),
        max_size=6,
    )
)
def test_packed_ids_of_any_form_come_back_the_same_in_their_order(ids):
    assert unpack(pack(ids)) == ids


def test_a_uuid_as_headrace_writes_it_takes_16_bytes():
    ids = [str(uuid.UUID(int=number << 64 | 7)) for number in range(8)]
    assert len(pack(ids)) == 1 + 8 * 16
    whole = "".join(ids)
    assert unpack(pack([whole[:35], whole[35:72]])) == [whole[:35], whole[35:72]]

"""The fingerprint of the first prompt in the records of real attempts."""

from __future__ import annotations

import itertools

from headrace.trajectory import ContentPart, Message
from headrace_workers.episode.first_prompt import fingerprint
from tests.workers.fakes import Script, Turns, play, say


class Unseeded(Turns):
    """An environment whose first observation comes from a counter of the process, not from the seed."""

    counter = itertools.count()

    def reset(self, seed: int | None = None) -> tuple[str, dict]:
        _, info = super().reset(seed)
        return f"number {next(self.counter)}", info


async def test_the_same_first_observation_gives_the_same_fingerprint_whatever_follows() -> None:
    first = await play(Script(say("a"), say("b")), lambda: Turns(last=2))
    second = await play(Script(say("x")), lambda: Turns(last=1))
    assert len(first.provenance.first_prompt) == 16
    assert first.provenance.first_prompt == second.provenance.first_prompt


async def test_a_first_observation_that_the_seed_does_not_fix_changes_the_fingerprint() -> None:
    records = [await play(Script(say("a")), lambda: Unseeded(last=1)) for _ in range(2)]
    assert records[0].provenance.first_prompt != records[1].provenance.first_prompt


def test_messages_tools_and_images_count_in_any_order_of_their_keys() -> None:
    text = [Message(role="user", content="Go.")]
    image = [Message(role="user", content=[ContentPart(type="image", asset="a" * 64)])]
    other = [Message(role="user", content=[ContentPart(type="image", asset="b" * 64)])]
    tool = {"name": "run", "parameters": {"a": 1, "b": 2}}
    turned = {"parameters": {"b": 2, "a": 1}, "name": "run"}
    prints = [fingerprint(text, []), fingerprint(image, []), fingerprint(other, []), fingerprint(text, [tool])]
    assert len(set(prints)) == 4
    assert fingerprint(text, [turned]) == prints[3]

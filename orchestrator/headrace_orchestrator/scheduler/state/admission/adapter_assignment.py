"""Assignment of frozen adapters to the agents of a group: made at its admission, the same for all its members.

* Fixed: always the first of the agent's adapters; round-robin: the next one for each group.
"""

from __future__ import annotations

from headrace.runspec import RunSpec


def assign_adapters(spec: RunSpec, number: int) -> dict[str, str]:
    """The adapters, by agent, of the ``number``-th group that the run admits, from 0."""
    return {
        name: agent.adapters[number % len(agent.adapters) if agent.routing == "round_robin" else 0]
        for name, agent in spec.policy.agents.items()
        if agent.adapters
    }

"""What is known of a run's policy servers: addresses, and which weights they are to hold and do hold."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.trajectory import Version
from headrace.wire.messages import Reason, Weights
from headrace.wire.policy_server import base_url

REMEMBERED_SKIPPED = 32
"""Skipped versions that are remembered: what a person wants to look back on."""


class PolicyServersState:
    """The policy servers of one run. ``told`` is soft."""

    __slots__ = ("held", "loaded", "servers", "skipped", "target", "told", "weights")

    def __init__(self, endpoints: Iterable[str]) -> None:
        #: By address: whether it drains.
        self.servers: dict[str, bool] = {base_url(endpoint): False for endpoint in endpoints}
        #: The version that the service is to load, and where it is; None where the learner loads.
        self.target: Version | None = None
        self.weights: Weights | None = None
        #: The newest version that servers take requests with, and where it came from; None if the learner loaded it.
        self.held = Version(0, 0)
        self.loaded: Weights | None = None
        #: Versions that were overtaken before any server served them, newest last.
        self.skipped: list[Version] = []
        #: Why servers keep a learner waiting.
        self.told: list[Reason] = []

    def announced(self, version: Version, rewound: bool, weights: Weights | None) -> None:
        """Take an announcement. What a driven run is rewound to is announced with its weights afterwards."""
        if weights is not None:
            if self.target is not None and self.target not in (self.held, version):
                self.skipped = [*self.skipped, self.target][-REMEMBERED_SKIPPED:]
            self.target, self.weights = version, weights
        elif version != self.target and not (rewound and self.target is not None):
            self.target = self.weights = self.loaded = None
            self.held = version

    def served(self, version: Version, weights: Weights) -> None:
        """The first server takes requests with a version."""
        self.held, self.loaded = version, weights
        self.skipped = [skipped for skipped in self.skipped if skipped != version]

    def past(self, version: Version) -> bool:
        """Whether no server will serve a version any more."""
        if self.target is None or version in (self.held, self.target):
            return False
        return version < self.held

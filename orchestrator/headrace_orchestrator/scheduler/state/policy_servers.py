"""The policy servers of a run: their addresses, and the weights that they load and serve."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.trajectory import Version
from headrace.wire.messages import Reason, Weights
from headrace.wire.policy_server import base_url

REMEMBERED_SKIPPED = 32
"""Maximum number of skipped versions remembered, for people to read."""


class PolicyServersState:
    """The policy servers of one run. ``reasons`` is soft."""

    __slots__ = ("held", "loaded", "reasons", "servers", "skipped", "target", "weights")

    def __init__(self, endpoints: Iterable[str]) -> None:
        #: Whether a server drains, by its address.
        self.servers: dict[str, bool] = {base_url(endpoint): False for endpoint in endpoints}
        #: The version that the service loads next, and its weights; None if the learner loads.
        self.target: Version | None = None
        self.weights: Weights | None = None
        #: The newest version that servers take requests with, and its weights; None if the learner loaded it.
        self.held = Version(0, 0)
        self.loaded: Weights | None = None
        #: Versions that were overtaken before any server served them, newest last.
        self.skipped: list[Version] = []
        #: The reasons why servers keep a learner waiting.
        self.reasons: list[Reason] = []

    def announce(self, version: Version, rewound: bool, weights: Weights | None) -> None:
        """Set the version to load. Where the service loads the weights, those of a rewind are announced after it."""
        if weights is not None:
            if self.target is not None and self.target not in (self.held, version):
                self.skipped = [*self.skipped, self.target][-REMEMBERED_SKIPPED:]
            self.target, self.weights = version, weights
        elif version != self.target and not (rewound and self.target is not None):
            self.target = self.weights = self.loaded = None
            self.held = version

    def set_served(self, version: Version, weights: Weights) -> None:
        """Set the version with which the first server takes requests."""
        self.held, self.loaded = version, weights
        self.skipped = [skipped for skipped in self.skipped if skipped != version]

    def is_replaced(self, version: Version) -> bool:
        """True if the servers have replaced a version, and none will serve it again."""
        if self.target is None or version in (self.held, self.target):
            return False
        return version < self.held

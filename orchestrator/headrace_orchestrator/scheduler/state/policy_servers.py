"""The policy servers of a run: their addresses, and the weights that they load and serve."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.trajectory import Version
from headrace.wire.messages import Reason, Weights
from headrace.wire.policy_server import base_url

REMEMBERED_SKIPPED = 32
"""Maximum number of skipped versions remembered, for people to read."""


IN_PROCESS = "the policy of the workers"
"""Stands for the address of a policy without one: it runs inside the workers."""

REMEMBERED_SAMPLED = 64
"""Maximum number of servers whose last version in a result is remembered."""

REMEMBERED_DIGESTS = 256
"""Maximum number of digests of weights remembered. Versions this far back are hardly announced again."""


class PolicyServersState:
    """The policy servers of one run. ``reasons`` and ``probed`` are soft."""

    __slots__ = (
        "confirmed",
        "digests",
        "held",
        "loaded",
        "probed",
        "reasons",
        "sampled",
        "servers",
        "skipped",
        "target",
        "weights",
    )

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
        #: The first version with weights of a digest, oldest first.
        self.digests: dict[str, Version] = {}
        #: The newest version in the last result of each server, by its address; and False while the last result shows
        #: an older version than the one that the learner announced before its attempt began.
        self.sampled: dict[str, Version] = {}
        self.confirmed = True
        #: The version that each server reported last, by its address.
        self.probed: dict[str, Version] = {}
        #: The reasons why servers keep a learner waiting.
        self.reasons: list[Reason] = []

    def announce(self, version: Version, rewound: bool, weights: Weights | None) -> None:
        """Set the version to load. Where the service loads the weights, those of a rewind are announced after it."""
        if weights is not None:
            if self.target is not None and self.target not in (self.held, version):
                self.skipped = [*self.skipped, self.target][-REMEMBERED_SKIPPED:]
            self.target, self.weights = version, weights
            self._remember(weights.digest, version)
        elif version != self.target and not (rewound and self.target is not None):
            self.target = self.weights = self.loaded = None
            self.held = version

    @property
    def served(self) -> Version:
        """The newest version that a server serves: the held one, unless results show that no server has it."""
        if self.confirmed:
            return self.held
        return min(self.held, max((*self.sampled.values(), *self.probed.values()), default=self.held))

    @property
    def served_by_address(self) -> dict[str, Version]:
        """The versions that the servers are known to serve, by address."""
        return self.probed or self.sampled

    def take_result(self, addresses: Iterable[str], began: Version, newest: Version) -> None:
        """Take the newest version in a result, and the version that was held when its attempt began. Where the service
        loads the weights, it knows the versions by itself."""
        sampled = self.sampled
        for address in addresses:
            sampled.pop(address, None)
            sampled[address] = newest
        while len(sampled) > REMEMBERED_SAMPLED:
            del sampled[next(iter(sampled))]
        self.confirmed = self.target is not None or newest >= began

    def _remember(self, digest: str, version: Version) -> None:
        if digest and self.digests.setdefault(digest, version) == version:
            while len(self.digests) > REMEMBERED_DIGESTS:
                del self.digests[next(iter(self.digests))]

    def same_weights_as(self, version: Version, weights: Weights | None) -> Version | None:
        """An earlier version of the same lineage with the same bytes. A new lineage begins with those of a
        checkpoint."""
        first = None if weights is None else self.digests.get(weights.digest)
        return first if first is not None and first < version and first.lineage == version.lineage else None

    def set_served(self, version: Version, weights: Weights) -> None:
        """Set the version with which the first server takes requests."""
        self.held, self.loaded = version, weights
        self.skipped = [skipped for skipped in self.skipped if skipped != version]

    def is_replaced(self, version: Version) -> bool:
        """True if the servers have replaced a version, and none will serve it again."""
        if self.target is None or version in (self.held, self.target):
            return False
        return version < self.held

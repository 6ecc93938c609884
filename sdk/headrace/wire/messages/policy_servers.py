"""Messages about the policy servers of a run."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.wire.messages.fields import RequestReference

PolicyServerState = Literal["unknown", "serving", "syncing", "draining", "ejected"]
"""unknown: not contacted yet. serving: takes requests. syncing: paused for new weights. draining: finishes its requests
and takes no new ones. ejected: takes no requests until it confirms an expected version."""


class PolicyServerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The status of one policy server of a run.

    ``version``: the last one that it confirmed; empty if none. ``paused_s``: total seconds of its pauses for new
    weights, including a current one. ``running``, ``waiting``: requests in the engine. ``kv_cache_used``: share of its
    KV cache, 0 to 1. ``reason``: why it is not serving.
    """

    address: str
    state: PolicyServerState
    version: str = ""
    paused_s: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    kv_cache_used: float = 0.0
    reason: str = ""


class PolicyServersReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The policy servers of a run.

    ``revision`` grows whenever a server is added, removed or changes its state or version: a long poll that names the
    last known revision returns at the next. ``sync``: the progress of the weight sync, or why the last one failed;
    empty if neither applies. ``skipped``: the latest versions that a newer one replaced before any server loaded them.
    ``digests``: of the latest announced versions, by version; of equal weights only the first version is listed.
    """

    epoch: int
    revision: int
    servers: list[PolicyServerStatus] = []
    sync: str = ""
    skipped: list[str] = []
    digests: dict[str, str] = {}


class PolicyServerRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Adds, drains or removes a policy server of a run. ``address``: as in ``policy.endpoints``."""

    address: RequestReference

"""Control messages between the orchestrator, workers and learners: JSON over HTTP.

* Messages hold durations, never absolute times; each is in seconds, and its name ends in ``_s``.
* Every response carries the epoch of the orchestrator, so that the responses of a paused older one are refused.
* Readers ignore unknown fields, so that either side can be newer by one release.
"""

# ruff: noqa: F403 - every message of a module is public, and named in that module only
from headrace.wire.messages.assets import *
from headrace.wire.messages.batches import *
from headrace.wire.messages.evaluations import *
from headrace.wire.messages.groups import *
from headrace.wire.messages.http import *
from headrace.wire.messages.policy_servers import *
from headrace.wire.messages.status import *
from headrace.wire.messages.trajectories import *
from headrace.wire.messages.versions import *
from headrace.wire.messages.workers import *

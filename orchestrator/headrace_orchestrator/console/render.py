"""Pages rendered from the state of the service.

* The page begins with whether the learner is waiting, and on what.
* Active runs come first, and of them those with a waiting learner.
* Runs that are over are collapsed.
* A learner that is gone or silent is not shown as training; what it still holds is stated.
* A worker that has sent nothing for a lease term is shown as silent, and its slots are not counted.
* While the disk refuses writes, the page begins with that.
* A page is complete without scripts, has none of its own, and loads nothing from other hosts.
"""

from __future__ import annotations

import importlib.resources
from typing import Any, NamedTuple, Protocol

from jinja2 import Environment, PackageLoader, StrictUndefined

from headrace.errors import LAYERS
from headrace.wire.messages import RunStatus, ServiceStatus, WorkerStatus

_TONES = {"waiting": 0, "busy": 1, "idle": 2, "over": 3}
"""The order of runs on the page, by the tone of their headlines."""


class Phase(Protocol):
    """The phase of the service. ``done`` of ``total`` bytes are read while it starts. ``failure``: the reason that it
    cannot store; ``remedy``: the action to take."""

    @property
    def name(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def failure(self) -> str: ...
    @property
    def remedy(self) -> str: ...


class Headline(NamedTuple):
    """A sentence that tells whether the learner of a run waits. ``tone``: waiting, busy, idle or over."""

    tone: str
    sentence: str
    details: list[str]


class PoolWorkers(NamedTuple):
    """A pool and its workers, silent ones last."""

    name: str
    workers: list[WorkerStatus]

    @property
    def summary(self) -> str:
        """The counts of its workers and slots; silent workers are counted apart."""
        present = [worker for worker in self.workers if not worker.silent]
        silent = len(self.workers) - len(present)
        busy, slots = sum(worker.leased for worker in present), sum(worker.slots for worker in present)
        return f"{len(present)} workers, {busy} of {slots} slots busy" + (f", and {silent} silent" if silent else "")


def headline(run: RunStatus) -> Headline:
    """The headline of a run, which tells whether its learner waits, and on what."""
    reasons = [reason.message for reason in run.reasons]
    if run.state != "active":
        over = {"finished": "is finished: all its tasks were served", "closed": "was closed"}[run.state]
        return Headline("over", f"No learner is waiting: the run {over}.", [])
    if run.learner_waiting:
        # Some episodes always run or are queued. If there is another reason, the learner waits for that one.
        causes = [reason for reason in run.reasons if reason.code != "collecting"] or run.reasons
        texts = dict.fromkeys(_WAITED_FOR.get(reason.code, reason.code) for reason in causes)
        return Headline("waiting", f"The learner is waiting for {_list(list(texts)) or 'a batch'}.", reasons)
    if run.learner_doing == "gone":
        said = f"No learner is connected: the last one ended {_ago(run.learner_doing_s, run)}"
        return Headline("idle", said, reasons)
    if run.learner_silent:
        said = f"The learner is silent: its last message came {_ago(run.learner_heard_s, run)}"
        return Headline("idle", said, reasons)
    if run.learner_doing in ("training", "evaluating", "checkpointing"):
        since = f" for {duration(run.learner_doing_s)}" if run.learner_doing_s >= 0 else ""
        return Headline("busy", f"The learner is not waiting: it has been {run.learner_doing}{since}.", reasons)
    if run.batches_open:
        return Headline("busy", "The learner is not waiting: it holds a batch.", reasons)
    if run.batches_acked or run.learner_doing:
        return Headline("idle", "The learner is not waiting: it does not pull now.", reasons)
    return Headline("idle", "No learner has pulled from this run yet.", reasons)


def _ago(seconds: float, run: RunStatus) -> str:
    """The end of a sentence: the time since, and the batches that the learner still holds."""
    batches = "a batch" if run.learner_holds == 1 else f"{run.learner_holds} batches"
    held = f" It holds {batches} unacked until the lease runs out." if run.learner_holds else ""
    return f"{duration(seconds)} ago.{held}"


_WAITED_FOR = {
    "collecting": "episodes that are running",
    "no-workers": "workers",
    "adapters": "policy servers: they could not take an adapter",
    "policy-saturated": "policy servers: they are at capacity",
    "no-policy-servers": "policy servers: none takes requests",
    "weight-sync": "new weights in the policy servers",
    **{f"{layer}-failing": f"the {layer}, which fails" for layer in LAYERS},
    "all-stale": "fresh episodes: all others are too stale",
    "oldest-group": "its oldest group, which would go stale",
    "policy-outdated": "policy servers: none has a version that may be trained on",
    "batches-held": "itself: it holds batches that it has not acked",
    "shards-not-fetched": "its own ranks that did not pull their shards",
    "byte-bound": "room: the run's bytes are used up",
    "service-byte-bound": "room: the bytes of all runs together are used up",
    "disk-bound": "room: the bytes of the disk bound are used up",
    "tasks-exhausted": "nothing: the tasks are exhausted",
    "groups-left": "nothing: too few groups are left for a batch",
    "evaluation-hold": "an evaluation",
    "quarantined": "nothing: the tasks are quarantined",
    "no-tasks": "tasks, which it must submit",
    "draining": "this orchestrator, which is stopping",
    "closed": "nothing: the run is closed",
    "filtered": "groups of the kinds that it requested",
    "zero-variance": "groups whose members have different rewards",
    "row-too-long": "groups whose rows fit into a bin",
    "no-rows": "episodes in which the policy acts",
    "prompts-differ": "groups whose members have the same task",
    "estimator-failing": "the estimator, which fails",
    "selection-rule-failing": "the selection rule, which fails",
    "group-ended": "nothing: a group that it waits for has ended",
}
"""The reasons of an empty pull in words, by code."""


def duration(seconds: float) -> str:
    """Format a duration in words."""
    if seconds < 1:
        return "less than a second"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


class Share(NamedTuple):
    """The shares of one kind of task, as the page shows them."""

    kind: str
    name: str
    drawn: int
    trained: int
    drawn_share: str
    trained_share: str


def shares(run: RunStatus) -> list[Share]:
    """The shares of a run's environments and tags, the most drawn first."""
    environments = [share for share in run.shares if share.kind == "environment"]
    drawn, trained = (sum(getattr(share, name) for share in environments) for name in ("drawn", "trained"))
    rows = sorted(run.shares, key=lambda share: (share.kind, -share.drawn, share.name))
    return [
        Share(s.kind, s.name, s.drawn, s.trained, _percent(s.drawn, drawn), _percent(s.trained, trained)) for s in rows
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none yet"


def console(status: ServiceStatus, phase: Phase, *, is_signed_in: bool = False) -> str:
    """The whole page."""
    return _templates.get_template("console.html").render(
        content=content(status, phase), version=status.version, is_signed_in=is_signed_in
    )


def sign_in(version: str, page: str, problem: str) -> str:
    """The page to sign in, which leads to ``page``; ``problem``: why the last try failed."""
    return _templates.get_template("sign_in.html").render(
        version=version, page=page, problem=problem, is_signed_in=False
    )


def static_file(name: str) -> bytes:
    """A file that pages load: console.js or console.css."""
    return importlib.resources.files(__package__).joinpath("static", name).read_bytes()


def content(status: ServiceStatus, phase: Phase) -> str:
    """The part of the page that changes."""
    headlines = [(run, headline(run)) for run in status.runs]
    headlines.sort(key=lambda entry: _TONES[entry[1].tone])
    return _templates.get_template("content.html").render(
        status=status,
        phase=phase,
        live=[entry for entry in headlines if entry[1].tone != "over"],
        over=[entry for entry in headlines if entry[1].tone == "over"],
        pools=_pools(status.workers),
    )


def docs(document: dict[str, Any], *, is_signed_in: bool = False) -> str:
    """The page that describes the HTTP interface."""
    return _templates.get_template("docs.html").render(
        document=document, version=document["info"]["version"], is_signed_in=is_signed_in
    )


def worker_state(worker: WorkerStatus) -> str:
    """A worker's state in one word."""
    if worker.silent:
        return "silent"
    return "draining" if worker.draining else "working" if worker.leased else "idle"


def _pools(workers: list[WorkerStatus]) -> list[PoolWorkers]:
    by_name: dict[str, list[WorkerStatus]] = {}
    for worker in sorted(workers, key=lambda worker: (worker.pool, worker.silent, worker.worker)):
        by_name.setdefault(worker.pool, []).append(worker)
    return [PoolWorkers(name, members) for name, members in sorted(by_name.items())]


def _list(words: list[str]) -> str:
    return ", and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else "".join(words)


def _templates_of_package() -> Environment:
    templates = Environment(
        loader=PackageLoader("headrace_orchestrator.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"duration": duration, "size": size, "worker_state": worker_state, "shares": shares}
    return templates


_templates = _templates_of_package()

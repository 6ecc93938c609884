"""TRL's asynchronous GRPO trainer as a learner (``trl.experimental.async_grpo``, trl 1.16), by its two protocols.

* The next batch is pulled while the trainer works on the current one.
* A batch is acked with the version that the trainer makes after it took the last row; earlier only if the run could not
  serve another batch otherwise.
* A batch without a version is given back when the trainer stops.
* An error of a pull is raised in the trainer. A pull that waits too long ends it with the pull's reasons.
* Each version of the trainer is announced; with ``weights`` the service loads it into the run's policy servers.

::

    weights = HeadraceWeights("model", "/shared/weights")
    rollouts = HeadraceRollouts(client, "guess", weights=weights)
    trainer = AsyncGRPOTrainer("model", ..., rollout_worker=rollouts, weight_transfer=weights)

TRL is not imported: the trainer calls methods by name. Its interface is experimental; pin its version.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from headrace.batch.batch import Batch
from headrace.client.operations import PullQuery
from headrace.client.prefetch import Prefetcher
from headrace.client.sync_client import Client
from headrace.errors import BatchAlreadyAcked, BatchSuperseded, NothingToServe, RunFinished, UnknownBatch
from headrace.integrations.trl_samples import RolloutSample, samples
from headrace.integrations.weight_folder import WeightFolder
from headrace.trajectory import Version

if TYPE_CHECKING:
    import torch

log = logging.getLogger("headrace.trl")

PREFETCH = 1
"""Number of prefetched batches. If the run's staleness does not allow it, the pull waits for the ack."""

WARN_AFTER_VERSIONS = 2
"""Versions made of one batch after which a warning is logged: its remaining rows get older with each."""


class HeadraceWeights(WeightFolder):
    """TRL's ``weight_transfer``: writes the weights of each step into a folder. ``HeadraceRollouts`` announces it, and
    the service pauses, loads and resumes the servers."""

    def init_weight_transfer(self) -> None:
        """Do nothing: no connection is needed."""

    def pause(self) -> None:
        """Do nothing: the service pauses the servers."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the tensors by name."""
        self.write(iterator)

    def resume(self) -> None:
        """Do nothing: the service resumes the servers."""

    def destroy(self) -> None:
        """Do nothing: the folders are kept for servers that start later."""


class HeadraceRollouts:
    """TRL's ``rollout_worker``.

    ``weights``: the folders of the versions; None: the trainer's own ``weight_transfer`` loads them into the servers,
    which must report the version. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        client: Client,
        run: str,
        *,
        weights: HeadraceWeights | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rollout_buffer = _SampleQueue(self._next_samples)
        self.metrics_queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._client, self._run, self._weights, self._clock = client, run, weights, clock
        self._prefetcher: Prefetcher | None = None
        self._batch: Batch | None = None  # the batch whose rows the trainer takes
        self._finished: list[Batch] = []  # batches with all rows taken and no version made since; oldest first
        self._room = 1  # batches that may be held at a time
        self._versions_of_batch = 0
        self._waiting: NothingToServe | None = None
        self._served_at = clock()
        self._version: Version | None = None
        self._model_version = 0
        self._groups = 0

    # Methods that the trainer calls

    def start(self) -> None:
        """Start pulling."""
        self._served_at = self._clock()
        self._room = self._client.run(self._run).spec["max_staleness"] + 1
        self._prefetcher = self._client._start_prefetcher(PullQuery(run=self._run), PREFETCH)

    def stop(self) -> None:
        """Stop pulling, and give back the batches without a version."""
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            prefetcher.close()
        reason = f"the trainer stopped with {self.rollout_buffer.clear()} samples left"
        for batch in [*self._finished, *([] if self._batch is None else [self._batch])]:
            self._end(batch, lambda batch: self._client.nack(batch, reason))
        self._batch, self._finished = None, []

    def update_model_version(self, model_version: int) -> None:
        """Ack the finished batches with the trainer's new version, or announce it.

        Both counts of versions increase alike; the run's count continues from its current version.
        """
        now = self._version or Version.parse(self._client.run(self._run).version)
        version = Version(now.lineage, now.n + model_version - self._model_version)
        weights = None if self._weights is None else self._weights.newest
        self._finish()
        self._ack(len(self._finished) - 1)
        last = self._finished.pop() if self._finished else None
        if last is None or not self._end(last, lambda batch: self._client.ack(batch, version, weights=weights)):
            self._client.announce(self._run, version, weights=weights)
        self._version, self._model_version = version, model_version
        self._warn_of_old_rows()

    def check_health(self, stale_after_s: float) -> None:
        """Raise NothingToServe if the trainer has waited that long, with the reasons of the pull."""
        waited_s = self._clock() - self._served_at
        if waited_s > stale_after_s:
            why = self._waiting
            raise NothingToServe(
                f"No batch of run {self._run!r} for {waited_s:.0f} s. {why.detail if why else ''}".rstrip(),
                hint="If episodes take that long, increase heartbeat_stale_after_s of AsyncGRPOConfig.",
                **(why.extra if why else {}),
            )

    # Batches

    def _next_samples(self, timeout_s: float | None) -> Iterable[RolloutSample]:
        """The samples of the next batch. Raises queue.Empty at the timeout."""
        self._finish()
        self._ack(len(self._finished) - self._room + 1)
        if self._prefetcher is None:
            raise queue.Empty
        started_at = self._clock()
        try:
            batch = self._prefetcher.take(timeout_s, self._client._operations.on_wait)
        except NothingToServe as error:
            self._waiting = error
            self._ack(len(self._finished))  # free all leases, so that the pull does not wait for them
            raise queue.Empty from error
        except RunFinished as error:
            error.hint = (
                "The trainer needs more batches than the run has: lower its max_steps, or give the run more tasks."
            )
            raise
        self._served_at = self._clock()
        self._batch, self._waiting, self._versions_of_batch = batch, None, 0
        rows = self._samples(batch)
        self._report_metrics(batch, rows, waited_s=self._served_at - started_at)
        return rows

    def _finish(self) -> None:
        """Mark the current batch as finished if the trainer took its last row."""
        if self._batch is not None and not self.rollout_buffer.qsize():
            self._finished.append(self._batch)
            self._batch = None

    def _ack(self, count: int) -> None:
        """Ack ``count`` finished batches without a version, the oldest first."""
        for batch in self._finished[: max(0, count)]:
            self._finished.remove(batch)
            self._end(batch, self._client.ack)

    def _samples(self, batch: Batch) -> list[RolloutSample]:
        first_version = 0 if self._version is None else self._version.n - self._model_version
        rows = samples(batch, first_version=first_version, first_group=self._groups, now_s=time.time())
        self._groups += len(batch.manifest.groups)
        return list(rows)

    def _end(self, batch: Batch, release: Callable[[Batch], Any]) -> bool:
        """End a batch by an ack or a nack. Returns false if its lease was lost, so that it may be served again."""
        try:
            release(batch)
        except (BatchAlreadyAcked, BatchSuperseded, UnknownBatch) as error:
            log.warning("The lease of batch %s was lost, and it may be trained on again: %s", batch.id, error)
            self.metrics_queue.put({"headrace/batches_lost_total": 1.0})
            return False
        return True

    def _warn_of_old_rows(self) -> None:
        self._versions_of_batch += self._batch is not None
        if self._versions_of_batch == WARN_AFTER_VERSIONS:
            log.warning(
                "The trainer made %d versions of batch %s and did not use all its rows, which get older; TRL drops "
                "rows beyond its max_staleness. Let a step take about one batch: set per_device_train_batch_size times "
                "gradient_accumulation_steps to about its samples, or use a smaller batch_size of the run.",
                WARN_AFTER_VERSIONS,
                self._batch and self._batch.id,
            )

    def _report_metrics(self, batch: Batch, rows: list[RolloutSample], waited_s: float) -> None:
        manifest = batch.manifest
        self.metrics_queue.put(
            {
                "headrace/batches_total": 1.0,
                "headrace/episodes_total": float(manifest.counts.trajectories),
                "headrace/samples_total": float(len(rows)),
                "headrace/staleness_max": float(manifest.staleness_max),
                "headrace/episode_reward": manifest.moments.rewards.mean,
                "headrace/batch_wait_s": waited_s,
            }
        )


class _SampleQueue:
    """The samples of the current batch, then of the next ones, with the interface of a ``queue.Queue``."""

    def __init__(self, more: Callable[[float | None], Iterable[RolloutSample]]) -> None:
        self._next_samples = more
        self._rows: deque[RolloutSample] = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """The next sample. Raises queue.Empty at the timeout."""
        while not self._rows:
            self._rows.extend(self._next_samples(timeout if block else 0.0))
        return self._rows.popleft()

    def qsize(self) -> int:
        """Number of samples that are available at once."""
        return len(self._rows)

    def clear(self) -> int:
        """Remove all samples; returns their number."""
        count = len(self._rows)
        self._rows.clear()
        return count

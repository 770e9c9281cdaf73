"""Follows a stream of KV events, from a server's sockets or a recorded file, and feeds a shadow ledger."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from ...backends.sinks.kv_events.file import KVEventFileWriter, is_kv_event_file, read_kv_event_file
from ...backends.sinks.kv_events.schema import AllBlocksCleared, BlockHash, KVEventBatch, encode_batch
from ...backends.sinks.kv_events.stream_order import StreamOrder
from ...backends.sinks.kv_events.subscriber import Endpoints, KVEventSubscriber
from ...core.errors import InputError
from ..figures import Document
from .follow_options import FollowOptions
from .shadow_ledger import SeenRequest, ShadowLedger


class Follower(AbstractContextManager["Follower"]):
    """One stream, its shadow ledger, and the order of its batches, which counts gaps."""

    def __init__(self, options: FollowOptions) -> None:
        """Open the output files. Raises InputError for one that exists."""
        self._options = options
        self._is_file = is_kv_event_file(options.endpoint)
        if not self._is_file and "://" not in options.endpoint:
            raise InputError(
                f"{options.endpoint} is neither a recorded stream of KV events nor an endpoint such as "
                "tcp://127.0.0.1:5557"
            )
        self.ledger = ShadowLedger(options.num_gpu_blocks, options.continuation_s)
        self.order = StreamOrder(self._apply, self._clear)
        self._files = ExitStack()
        self._recording: KVEventFileWriter | None = None
        self._num_recorded = 0
        self._start_s: float | None = None
        if options.record is not None:
            self._recording = KVEventFileWriter(options.record)
            self._files.callback(self._recording.close)
        if options.trace_out is not None:
            self._open_trace(options.trace_out)

    def __exit__(self, *_: object) -> None:
        self.ledger.requests.forget()
        self._files.close()

    def run(self, on_report: Callable[[Document], None]) -> Document:
        """Follow until the duration ends, the file ends, or an interrupt. Returns the last report.

        `on_report` is called with each report; the interval is by this machine's clock, or by the recorded one.
        """
        for _ in self._through_file() if self._is_file else self._through_sockets():
            on_report(self.ledger.report(self.order.counts))
        return self.ledger.report(self.order.counts)

    def _through_file(self) -> Iterator[None]:
        due: float | None = None
        for sequence, payload in read_kv_event_file(self._options.endpoint):
            self.order.offer(sequence, payload)
            self.order.give_up()
            now = self.ledger.last_ts
            if now is None:
                continue
            due = now + self._options.interval if due is None else due
            if now >= due:
                due = now + self._options.interval
                yield

    def _through_sockets(self) -> Iterator[None]:
        options = self._options
        endpoints = Endpoints(
            options.endpoint, options.replay_endpoint, options.topic, offers_snapshots=options.snapshots
        )
        started = time.monotonic()
        due = started + options.interval
        end = None if options.duration is None else started + options.duration
        with KVEventSubscriber(endpoints, self.order) as subscriber:
            subscriber.catch_up()
            while end is None or time.monotonic() < end:
                now = time.monotonic()
                subscriber.receive(max(0.0, min(due, end or due) - now))
                if time.monotonic() >= due:
                    due += options.interval
                    yield

    def _apply(self, sequence: int, batch: KVEventBatch) -> None:
        self._start_s = batch.ts if self._start_s is None else self._start_s
        self.ledger.apply(sequence, batch)
        self._record(batch)

    def _clear(self) -> None:
        self.ledger.clear()
        self._record(KVEventBatch(self.ledger.last_ts or 0.0, [AllBlocksCleared()]))

    def _record(self, batch: KVEventBatch) -> None:
        """Record an applied batch under the file's own numbers; a gap that stays open becomes a clear event."""
        if self._recording is not None:
            self._recording.write(self._num_recorded, encode_batch(batch))
            self._num_recorded += 1

    def _open_trace(self, path: str) -> None:
        if Path(path).exists():
            raise InputError(f"{path} exists already; give another name")
        file = self._files.enter_context(Path(path).open("w"))  # noqa: SIM115

        numbers: dict[BlockHash, int] = {}

        def write(request: SeenRequest) -> None:
            file.write(json.dumps(request.row(numbers, self._start_s or 0.0)) + "\n")

        self.ledger.requests.ended = write

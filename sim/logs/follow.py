"""Follows a stream of KV events, from a server's sockets or a recorded file, and feeds a shadow ledger."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import attrs

from ...backends.sinks.kv_events.file import KVEventFileWriter, is_kv_event_file, read_kv_event_file
from ...backends.sinks.kv_events.schema import AllBlocksCleared, KVEventBatch, encode_batch
from ...backends.sinks.kv_events.stream_order import StreamOrder
from ...backends.sinks.kv_events.subscriber import Endpoints, KVEventSubscriber
from ...core.errors import InputError
from ..figures import Document
from .shadow_ledger import HashNumbers, SeenRequest, ShadowLedger


@attrs.frozen
class FollowOptions:
    """What to follow, and where to write it.

    Attributes:
        source: the publisher's endpoint, or a recorded file.
        replay_endpoint: the endpoint that resends missed batches.
        topic: prefix of the topics to receive.
        offers_snapshots: whether the producer sends its whole state on request.
        num_gpu_blocks: blocks of the server's pool, if known.
        continuation_s: see `ShadowLedger`.
        record: file for the stream, in order; None: not written.
        trace_out: file for the requests seen, as a Mooncake trace; None: not written.
    """

    source: str
    replay_endpoint: str | None = None
    topic: str = ""
    offers_snapshots: bool = False
    num_gpu_blocks: int | None = None
    continuation_s: float = 2.0
    record: str | None = None
    trace_out: str | None = None


class Follower(AbstractContextManager["Follower"]):
    """One stream and its shadow ledger.

    Attributes:
        ledger: the state that the stream describes.
        order: puts batches in order and counts gaps.
    """

    def __init__(self, options: FollowOptions) -> None:
        """Open the output files. Raises InputError for one that exists."""
        self._options = options
        self._is_file = is_kv_event_file(options.source)
        if not self._is_file and "://" not in options.source:
            raise InputError(
                f"{options.source} is neither a recorded stream of KV events nor an endpoint such as "
                "tcp://127.0.0.1:5557"
            )
        if options.continuation_s < 0:
            raise InputError(f"--continuation-s is {options.continuation_s}; it must be 0 or more seconds")
        self.ledger = ShadowLedger(options.num_gpu_blocks, options.continuation_s)
        self.order = StreamOrder(self._apply, self._clear)
        self._files = ExitStack()
        self._recording: KVEventFileWriter | None = None
        self._num_recorded = 0
        self._start_s: float | None = None
        self._numbers = HashNumbers()
        if options.record is not None:
            self._recording = KVEventFileWriter(options.record)
            self._files.callback(self._recording.close)
        if options.trace_out is not None:
            self._open_trace(options.trace_out)

    def __exit__(self, *_: object) -> None:
        self.ledger.requests.forget()
        self._files.close()

    def run(self, interval_s: float, duration_s: float | None, on_report: Callable[[Document], None]) -> Document:
        """Follow until the duration ends, the file ends, or an interrupt. Returns the last report.

        Args:
            interval_s: seconds between reports, by this machine's clock or the recorded one.
            duration_s: seconds to follow a server; None: until interrupted.
            on_report: called with each report.
        """
        steps = self._through_file(interval_s) if self._is_file else self._through_sockets(interval_s, duration_s)
        for _ in steps:
            on_report(self.ledger.report(self.order.counts))
        return self.ledger.report(self.order.counts)

    def _through_file(self, interval_s: float) -> Iterator[None]:
        due: float | None = None
        for sequence, payload in read_kv_event_file(self._options.source):
            self.order.offer(sequence, payload)
            self.order.give_up()
            now = self.ledger.last_ts
            if now is None:
                continue
            due = now + interval_s if due is None else due
            if now >= due:
                due = now + interval_s
                yield

    def _through_sockets(self, interval_s: float, duration_s: float | None) -> Iterator[None]:
        options = self._options
        endpoints = Endpoints(
            options.source, options.replay_endpoint, options.topic, offers_snapshots=options.offers_snapshots
        )
        started = time.monotonic()
        due = started + interval_s
        end = None if duration_s is None else started + duration_s
        with KVEventSubscriber(endpoints, self.order) as subscriber:
            subscriber.catch_up()
            while end is None or time.monotonic() < end:
                now = time.monotonic()
                subscriber.receive(max(0.0, min(due, end or due) - now))
                if time.monotonic() >= due:
                    due += interval_s
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

        def write(request: SeenRequest) -> None:
            file.write(json.dumps(self._numbers.row(request, self._start_s or 0.0)) + "\n")

        self.ledger.requests.ended = write

"""Subscribes to a stream of KV events and repairs gaps by replay or by a snapshot of the whole state."""

import time
from collections.abc import Iterator
from typing import Any, Final

import attrs
import zmq

from ....core.errors import InputError
from .publisher import END_OF_REPLAY, SNAPSHOT_REQUEST
from .schema import decode_batch
from .stream_order import StreamOrder

_STEP_MS: Final = 50


@attrs.frozen
class Endpoints:
    """The source of a stream.

    Attributes:
        endpoint: the publisher.
        replay_endpoint: where to ask for missed batches; None: nowhere.
        topic: prefix of the wanted topics.
        replay_timeout_s: longest wait for the first and for each further message of a replay.
        offers_snapshots: whether the producer sends its whole state on request (ours does with `describes_itself`).
        receive_hwm: messages that may wait here before the publisher keeps or drops them.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    replay_timeout_s: float = 5.0
    offers_snapshots: bool = False
    receive_hwm: int = 100_000


class KVEventSubscriber:
    """Receives a stream and keeps it in order.

        order = StreamOrder(lambda sequence, batch: pool.apply(batch.events), pool.clear)
        with KVEventSubscriber(Endpoints("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"), order) as subscriber:
            while True: subscriber.receive(timeout_s=1.0)

    A replay request starts one batch before the gap: that batch's payload shows whether the producer has restarted. If
    it has, the order restarts and everything is requested from 0. A gap that no replay closes is closed by a snapshot,
    or given up.
    """

    def __init__(self, endpoints: Endpoints, order: StreamOrder) -> None:
        """Connect. Call `receive` to receive messages."""
        self._endpoints = endpoints
        self._order = order
        self._answer_was_whole = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(endpoints.receive_hwm)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, endpoints.topic)
        self._socket.connect(endpoints.endpoint)

    def receive(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` for messages, accept those that have arrived, and return their number."""
        deadline = time.monotonic() + timeout_s
        taken = 0
        while True:
            wait_ms = 0 if taken else max(0, round((deadline - time.monotonic()) * 1e3))
            if not self._socket.poll(min(wait_ms, _STEP_MS)):
                if taken or time.monotonic() >= deadline:
                    return taken
                continue
            frames = self._socket.recv_multipart()
            taken += 1
            if len(frames) >= 2 and len(frames[-2]) == 8:
                self._order.offer(int.from_bytes(frames[-2], "big"), frames[-1])
            else:
                shape = f"{len(frames)} frames of {', '.join(str(len(frame)) for frame in frames)} bytes"
                self._order.reject(f"{shape} are no topic, sequence number of 8 bytes and payload")
            if self._order.gap is not None:
                self._close_gap()

    def catch_up(self) -> None:
        """Request everything published before this subscriber connected; do nothing without a replay endpoint."""
        if self._order.expected is None:
            self._offer_from_start()
            if self._order.gap is not None:
                self._close_gap()

    def close(self) -> None:
        """Disconnect."""
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> "KVEventSubscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _offer_from_start(self) -> None:
        for sequence, payload in self._replayed(0):
            self._order.offer(sequence, payload, is_replay=True)

    def _close_gap(self) -> None:
        order = self._order
        for _ in range(2):  # again after a restart that only the replay showed
            gap = order.gap
            if gap is None:
                return
            overlap = order.last_applied
            restarted = False
            for sequence, payload in self._replayed(gap.first if overlap is None else overlap):
                if sequence == overlap:
                    if not order.matches(sequence, payload):
                        restarted = True
                        break
                else:
                    order.offer(sequence, payload, is_replay=True)
                    if order.gap is None:
                        return
            if not restarted:
                break
            order.restart()
            self._offer_from_start()
        if order.gap is not None and not self._take_over_snapshot():
            order.give_up()

    def _take_over_snapshot(self) -> bool:
        if not self._endpoints.offers_snapshots:
            return False
        parts = list(self._answers(SNAPSHOT_REQUEST))
        if not parts or not self._answer_was_whole:
            return False
        try:
            batches = [decode_batch(payload) for _, payload in parts]
        except InputError as error:
            self._order.reject(f"the snapshot: {error}")
            return False
        self._order.take_over(parts[0][0], batches)
        return True

    def _replayed(self, first: int) -> Iterator[tuple[int, bytes]]:
        return self._answers(first.to_bytes(8, "big"))

    def _answers(self, request: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield (number, payload) of the answers to a request until the end mark or `replay_timeout_s` of silence."""
        self._answer_was_whole = False
        if self._endpoints.replay_endpoint is None:
            return
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.connect(self._endpoints.replay_endpoint)
            socket.send_multipart([b"", request])
            while socket.poll(round(self._endpoints.replay_timeout_s * 1e3)):
                frames = socket.recv_multipart()
                if len(frames) < 2 or frames[-2] == END_OF_REPLAY or not frames[-1]:
                    self._answer_was_whole = True
                    return
                yield int.from_bytes(frames[-2], "big", signed=True), frames[-1]
        finally:
            socket.close(linger=0)

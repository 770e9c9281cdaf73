"""Publishes KV events over ZeroMQ: one socket publishes, another replays batches to subscribers that missed them.

A message is [topic, sequence number, payload]; a replayed one has the empty frame of a request socket before it. A
replay request is the first wanted number (8 bytes, big-endian); the answer ends with the number -1 and an empty
payload. The request `snapshot` (if `describes_itself` is on) is answered with the whole state as events, under the
number of the last batch that they include.
"""

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from ....core.errors import InputError, MisuseError
from ....core.events import Commit
from .encoder import KVEventEncoder
from .schema import KVCacheEvent, KVEventBatch, KVEventsConfig, encode_batch
from .shadow_pool import ShadowPool

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
SNAPSHOT_REQUEST: Final = b"snapshot"
_POLL_MS: Final = 50
# A replay ends if its reader takes nothing for this long.
_SEND_TIMEOUT_MS: Final = 10_000
_EVENTS_PER_SNAPSHOT_BATCH: Final = 256


class KVEventPublisher:
    """Publishes batches of events from its own thread. With an encoder it is also a sink of an allocator.

        publisher = KVEventPublisher(KVEventsConfig(endpoint="tcp://*:5557"), KVEventEncoder(contents))
        allocator = KVCacheAllocator(config, sinks=[publisher])

    Attributes:
        endpoint: where it publishes, with the real port instead of a wildcard.
        replay_endpoint: where it replays; None if it does not.
    """

    def __init__(
        self,
        config: KVEventsConfig,
        encoder: KVEventEncoder | None = None,
        *,
        now_s: Callable[[], float] = time.time,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Bind (or connect) and start.

        Args:
            config: where and how to publish.
            encoder: turns commits into events, for `apply`.
            now_s: the clock of the batches, in seconds.
            data_parallel_rank: the rank that every batch states, if any.

        Raises:
            InputError: an endpoint that cannot be bound.
        """
        self._config = config
        self._encoder = encoder
        self._now_s = now_s
        self._rank = data_parallel_rank
        self._topic = config.topic.encode()
        self._queue: queue.Queue[KVEventBatch | None] = queue.Queue(config.max_queue_size)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._pool = ShadowPool(describes_itself=True) if config.describes_itself else None
        self._next_sequence = 0
        self._failure: InputError | None = None
        self._mutex = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.endpoint: str | None = None
        self.replay_endpoint: str | None = None
        self._context: zmq.Context[Any] | None = None
        if config.is_on:
            self._start()

    def _start(self) -> None:
        self._context = zmq.Context()
        sockets: list[zmq.Socket[Any]] = []
        try:
            publishing = self._context.socket(zmq.PUB)
            sockets.append(publishing)
            publishing.set_hwm(self._config.hwm)
            self.endpoint = _attach(publishing, self._config.endpoint)
            self._threads.append(threading.Thread(target=self._publish_all, args=(publishing,), daemon=True))
            if self._config.replay_endpoint is not None:
                replaying = self._context.socket(zmq.ROUTER)
                sockets.append(replaying)
                # Without this a ROUTER drops messages for a slow reader; with it, sending waits.
                replaying.setsockopt(zmq.ROUTER_MANDATORY, 1)
                replaying.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
                self.replay_endpoint = _attach(replaying, self._config.replay_endpoint, always_bind=True)
                self._threads.append(threading.Thread(target=self._replay_all, args=(replaying,), daemon=True))
        except InputError:
            for socket in sockets:
                socket.close(linger=0)
            self._context.term()
            raise
        for thread in self._threads:
            thread.start()

    def apply(self, commit: Commit) -> None:
        """Publish the events of a commit, if it has any."""
        if self._encoder is None:
            raise MisuseError("this publisher was given no encoder, so it cannot take commits; publish(events) instead")
        events = self._encoder.encode(commit)
        if events:
            self.publish(events)

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Queue one batch for the sending thread; wait only while `max_queue_size` batches are queued.

        Raises:
            InputError: an earlier batch could not be encoded, and was not sent.
        """
        if self._stopping.is_set():
            raise MisuseError("the publisher is closed")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._config.is_on:
            self._queue.put(KVEventBatch(self._now_s(), list(events), self._rank))

    def close(self, linger_s: float = 1.0) -> None:
        """Send the queued batches for at most `linger_s` seconds, then stop. A second call does nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=linger_s)
        for thread in self._threads:
            thread.join()
        if self._context is not None:
            self._context.term()

    def __enter__(self) -> "KVEventPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _publish_all(self, socket: "zmq.Socket[Any]") -> None:
        while (batch := self._queue.get()) is not None:
            try:
                payload = encode_batch(batch)
            except (TypeError, OverflowError, ValueError) as error:
                self._failure = InputError(f"a batch of KV events cannot be encoded: {error}")
                continue
            with self._mutex:
                sequence = self._next_sequence
                self._next_sequence += 1
                self._buffer.append((sequence, payload))
                if self._pool is not None:
                    self._pool.apply(batch.events)
            socket.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])
        socket.close(linger=1000)

    def _replay_all(self, socket: "zmq.Socket[Any]") -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        while not self._stopping.is_set():
            if poller.poll(_POLL_MS):
                # A reader that left, or takes nothing, is dropped; the others are served.
                with contextlib.suppress(zmq.ZMQError):
                    self._answer(socket, socket.recv_multipart())
        socket.close(linger=1000)

    def _answer(self, socket: "zmq.Socket[Any]", frames: list[bytes]) -> None:
        identity, request = frames[0], frames[-1]
        envelope = [identity, b""]
        if request == SNAPSHOT_REQUEST and self._pool is not None:
            for sequence, payload in self._snapshot():
                socket.send_multipart([*envelope, self._topic, sequence.to_bytes(8, "big", signed=True), payload])
        elif len(request) == 8:
            first = int.from_bytes(request, "big")
            with self._mutex:
                missed = [each for each in self._buffer if each[0] >= first]
            for sequence, payload in missed:
                socket.send_multipart([*envelope, self._topic, sequence.to_bytes(8, "big"), payload])
        socket.send_multipart([*envelope, self._topic, END_OF_REPLAY, b""])

    def _snapshot(self) -> list[tuple[int, bytes]]:
        assert self._pool is not None
        with self._mutex:
            sequence = self._next_sequence - 1
            events = list(self._pool.describe())
        step = _EVENTS_PER_SNAPSHOT_BATCH
        parts = [events[start : start + step] for start in range(0, len(events), step)]
        return [(sequence, encode_batch(KVEventBatch(self._now_s(), part, self._rank))) for part in parts]


def _attach(socket: "zmq.Socket[Any]", endpoint: str, always_bind: bool = False) -> str:
    """Bind to an endpoint that names no single host, else connect, as vLLM does. Return the real endpoint."""
    bind = always_bind or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise InputError(f"cannot {'bind' if bind else 'connect'} {endpoint}: {error}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).replace("0.0.0.0", "127.0.0.1")

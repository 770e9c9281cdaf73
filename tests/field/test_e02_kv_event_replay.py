"""E02: gaps are found and made good, over real sockets on loopback (vllm#45174, #45177; sglang PR#38945;
llm-d-router#1737; Mooncake PR#3616; ROCm/ATOM PR#1316; llm-d-inference-sim#477).
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from kvledger.backends.sinks.kv_events.content import ContentRegistry, RequestContent, SyntheticTokens
from kvledger.backends.sinks.kv_events.encoder import KVEventEncoder, block_hash
from kvledger.backends.sinks.kv_events.publisher import END_OF_REPLAY, KVEventPublisher
from kvledger.backends.sinks.kv_events.schema import BlockStored, KVEventBatch, KVEventsConfig
from kvledger.backends.sinks.kv_events.shadow_pool import ShadowPool
from kvledger.backends.sinks.kv_events.stream_order import Gap, StreamOrder
from kvledger.backends.sinks.kv_events.subscriber import Endpoints, KVEventSubscriber
from kvledger.core import AllocatorConfig, FullAttention, KVCacheAllocator, Request

pytestmark = pytest.mark.timeout(60)
LOCAL = "tcp://127.0.0.1:*"


def one_block(number: int) -> list[BlockStored]:
    return [BlockStored([number], number - 1 if number else None, [number], 1, medium="GPU", group_idx=0)]


class Consumer:
    """A subscriber whose view is a shadow pool, and the numbers of the batches that it applied."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.pool = ShadowPool()
        self.sequences: list[int] = []
        self.order = StreamOrder(self._apply, self._clear)
        self.subscriber = KVEventSubscriber(endpoints, self.order)

    def _apply(self, sequence: int, batch: KVEventBatch) -> None:
        self.sequences.append(sequence)
        self.pool.apply(batch.events)

    def _clear(self) -> None:
        self.sequences.clear()
        self.pool.clear()

    def receive_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not done():
            assert time.monotonic() < deadline, (self.sequences[-5:], self.order.counts, self.order.gap)
            self.subscriber.receive(0.05)


class Wire:
    """The live socket in the hands of the test: what it drops, delays and repeats is seen by the consumer as such."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.bind(LOCAL)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_for_subscriber(self) -> None:
        assert self._socket.poll(10_000), "nobody subscribed"
        self._socket.recv()

    def send(self, frames: list[tuple[int, bytes]]) -> None:
        for sequence, payload in frames:
            self._socket.send_multipart([b"", sequence.to_bytes(8, "big"), payload])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


@pytest.fixture
def publishers() -> Iterator[Callable[..., KVEventPublisher]]:
    made: list[KVEventPublisher] = []

    def make(num_batches: int = 0, **config: Any) -> KVEventPublisher:
        publisher = KVEventPublisher(KVEventsConfig(**{"endpoint": LOCAL, "replay_endpoint": LOCAL} | config))
        made.append(publisher)
        for number in range(num_batches):
            publisher.publish(one_block(number))
        return publisher

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def consumers() -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(endpoint: str, **endpoints: Any) -> Consumer:
        made.append(Consumer(Endpoints(endpoint, **endpoints)))
        return made[-1]

    yield make
    for consumer in made:
        consumer.subscriber.close()


def ask(endpoint: str, request: bytes, receive_hwm: int = 1000, pause_s: float = 0.0) -> list[list[bytes]]:
    """Every frame of an answer, its end mark included, read with a queue of the given size."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set_hwm(receive_hwm)
        socket.connect(endpoint)
        socket.send_multipart([b"", request])
        frames: list[list[bytes]] = []
        while not frames or frames[-1][-2] != END_OF_REPLAY:
            assert socket.poll(10_000), f"no end mark after {len(frames)} frames"
            frames.append(socket.recv_multipart())
            time.sleep(pause_s)
        socket.close(linger=0)
        return frames


def sent_by(publisher: KVEventPublisher, count: int) -> list[tuple[int, bytes]]:
    """(number, payload) of the first `count` batches."""
    deadline = time.monotonic() + 10
    while True:
        frames = ask(publisher.replay_endpoint, (0).to_bytes(8, "big"))[:-1]
        if len(frames) >= count:
            return [(int.from_bytes(frame[-2], "big"), frame[-1]) for frame in frames[:count]]
        assert time.monotonic() < deadline


def test_a_gap_is_replayed_from_its_beginning_each_batch_once(wire, publishers, consumers) -> None:
    """Test 1: 1, 2, 3, 7 are seen."""
    publisher = publishers(8)
    frames = sent_by(publisher, 8)
    consumer = consumers(wire.endpoint, replay_endpoint=publisher.replay_endpoint)
    wire.wait_for_subscriber()
    wire.send([frames[i] for i in (0, 1, 2, 3, 7)])
    consumer.receive_until(lambda: len(consumer.sequences) == 8)
    assert consumer.sequences == list(range(8))
    assert (consumer.order.counts.gaps, consumer.order.counts.replayed) == (1, 3)
    wire.send([frames[i] for i in (4, 6, 7, 5)])
    consumer.receive_until(lambda: consumer.order.counts.duplicates == 4)
    assert consumer.sequences == list(range(8)), "what comes late is not applied again"


def test_what_the_buffer_no_longer_holds_is_named_and_the_state_taken_over(wire, publishers, consumers) -> None:
    """Test 2: the buffer holds only 6 and later."""
    publisher = publishers(8, buffer_steps=2, describes_itself=True)
    frames = sent_by(publisher, 2)
    assert [number for number, _ in frames] == [6, 7]
    payloads = dict(sent_by(publishers(8), 8))
    consumer = consumers(wire.endpoint, replay_endpoint=publisher.replay_endpoint, offers_snapshots=True)
    wire.wait_for_subscriber()
    wire.send([(number, payloads[number]) for number in range(4)])
    wire.send([frames[1]])
    consumer.receive_until(lambda: consumer.order.counts.snapshots == 1)
    assert consumer.order.gap is None
    assert {hashed for _, hashed in consumer.pool.blocks} == set(range(8))
    assert consumer.order.expected == 8


def test_without_a_snapshot_the_loss_is_counted_and_nothing_stale_is_kept(wire, publishers, consumers) -> None:
    publisher = publishers(8, buffer_steps=2)
    payloads = dict(sent_by(publishers(8), 8))
    consumer = consumers(wire.endpoint, replay_endpoint=publisher.replay_endpoint)
    gaps: list[Gap] = []
    give_up = consumer.order.give_up
    consumer.order.give_up = lambda: (gaps.append(consumer.order.gap), give_up())
    wire.wait_for_subscriber()
    wire.send([(number, payloads[number]) for number in range(4)])
    wire.send([sent_by(publisher, 2)[1]])
    consumer.receive_until(lambda: consumer.order.counts.unrecoverable > 0)
    assert gaps == [Gap(4, 5)]
    assert consumer.order.counts.unrecoverable == 2
    assert {hashed for _, hashed in consumer.pool.blocks} == {6, 7}
    assert consumer.pool.num_orphans == 1


@pytest.mark.parametrize("pause_s", [0.0, 0.0005])
def test_a_thousand_batches_reach_a_reader_with_a_queue_of_two(publishers, pause_s) -> None:
    """Test 3: 1,024 and the end mark."""
    publisher = publishers(1024)
    sent_by(publisher, 1024)
    frames = ask(publisher.replay_endpoint, (0).to_bytes(8, "big"), receive_hwm=2, pause_s=pause_s)
    assert [int.from_bytes(frame[-2], "big", signed=True) for frame in frames] == [*range(1024), -1]


def test_a_replayed_message_has_the_fields_of_a_live_one(publishers) -> None:
    """Test 4: topic, number, payload."""
    publisher = publishers(topic="kv-events")
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
        socket.connect(publisher.endpoint)
        for number in range(400):  # until the subscription has got there
            publisher.publish(one_block(number))
            if socket.poll(25):
                break
        live = socket.recv_multipart()
        socket.close(linger=0)
    (replayed, *_) = ask(publisher.replay_endpoint, live[1])
    assert replayed == [b"", *live]
    assert live[0] == b"kv-events"


def test_a_new_run_of_the_producer_clears_the_state_first(wire, publishers, consumers) -> None:
    """Test 5: numbers begin at 0 again."""
    first = publishers(5)
    frames = sent_by(first, 5)
    consumer = consumers(wire.endpoint, replay_endpoint=first.replay_endpoint)
    wire.wait_for_subscriber()
    wire.send(frames)
    consumer.receive_until(lambda: len(consumer.sequences) == 5)
    second = publishers()
    for number in (100, 101):
        second.publish(one_block(number))
    wire.send(sent_by(second, 2))
    consumer.receive_until(lambda: consumer.sequences == [0, 1])
    assert {hashed for _, hashed in consumer.pool.blocks} == {100, 101}
    assert consumer.order.counts.restarts == 1


def test_a_new_run_that_is_ahead_already_is_told_by_the_overlap_of_the_replay(wire, publishers, consumers) -> None:
    """The consumer had 0..4; what it sees next is 8 of another run, which looks like a gap of 5..7."""
    frames = sent_by(publishers(5), 5)
    second = publishers()
    for number in range(100, 109):
        second.publish(one_block(number))
    later = sent_by(second, 9)
    consumer = consumers(wire.endpoint, replay_endpoint=second.replay_endpoint)
    wire.wait_for_subscriber()
    wire.send(frames)
    consumer.receive_until(lambda: len(consumer.sequences) == 5)
    wire.send([later[8]])
    consumer.receive_until(lambda: consumer.order.counts.restarts == 1)
    wire.send([later[8]])
    consumer.receive_until(lambda: len(consumer.sequences) == 9)
    assert {hashed for _, hashed in consumer.pool.blocks} == set(range(100, 109))


class Ids:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def keys(self, start: int, stop: int) -> list[int]:
        return self.ids[start:stop]


@pytest.mark.parametrize("mode", ["vllm", "strict"])
def test_a_lossy_stream_of_a_live_allocator_ends_in_its_pool(wire, publishers, consumers, mode) -> None:
    """Dropped, delayed and repeated at random: fold(all events) == live pool."""
    chance = random.Random(mode)
    registry = ContentRegistry()
    publisher = KVEventPublisher(
        KVEventsConfig(endpoint=LOCAL, replay_endpoint=LOCAL, describes_itself=True),
        KVEventEncoder(registry, wire=mode),
    )
    allocator = KVCacheAllocator(
        AllocatorConfig(num_blocks=24, groups=[FullAttention(4)], max_model_len=64, max_num_reqs=4), [publisher]
    )
    for number in range(120):
        keys = Ids([number % 3, 10 + number % 5, 100 + number, 1000 + number])
        registry.add(str(number), RequestContent(SyntheticTokens(keys, 4), keys))
        request = Request(str(number), 17, keys=keys)
        match = allocator.match_prefix(request)
        allocator.allocate(request, 17 - match.num_hit_tokens, match)
        allocator.free(str(number))
        if number % 40 == 39:
            allocator.evict(list(range(1, 12)))
    publisher.publish([])  # the last message is not one of those that get lost
    deadline = time.monotonic() + 10
    frames = sent_by(publisher, 1)
    while True:
        more = ask(publisher.replay_endpoint, (0).to_bytes(8, "big"))[:-1]
        if len(more) == len(frames) > 100:
            break
        frames = more
        assert time.monotonic() < deadline
    frames = [(int.from_bytes(frame[-2], "big"), frame[-1]) for frame in frames]
    shuffled = [frame for frame in frames[:-1] if chance.random() > 0.2]
    shuffled.sort(key=lambda frame: frame[0] + chance.choice([0, 0, 0, chance.uniform(0, 5)]))
    repeated = [frame for frame in shuffled for _ in range(chance.choice([1, 1, 1, 2]))]
    consumer = consumers(wire.endpoint, replay_endpoint=publisher.replay_endpoint)
    wire.wait_for_subscriber()
    wire.send([*repeated, frames[-1]])
    consumer.receive_until(lambda: consumer.order.expected == len(frames))
    pool = allocator.pool
    assert consumer.pool.by_copies() == {(0, block_hash(key)): len(pool.copies(key)) for key in pool.index()}
    assert consumer.sequences == list(range(len(frames)))
    assert consumer.order.counts.gaps > 3
    late = consumers(wire.endpoint, replay_endpoint=publisher.replay_endpoint, offers_snapshots=True)
    late.order.expected = 0
    late.subscriber._take_over_snapshot()
    assert late.pool.by_copies() == consumer.pool.by_copies(), "fold(snapshot + tail) == fold(all events)"
    publisher.close()


def test_a_stream_is_followed_live_from_its_first_batch(publishers, consumers) -> None:
    publisher = publishers(3)
    consumer = consumers(publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
    consumer.subscriber.catch_up()
    for number in range(3, 60):
        publisher.publish(one_block(number))
        consumer.subscriber.receive(0.01)
    consumer.receive_until(lambda: consumer.order.expected is not None and consumer.order.expected >= 50)
    assert consumer.sequences == list(range(len(consumer.sequences)))

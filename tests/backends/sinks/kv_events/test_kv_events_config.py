"""`--kv-events-config`: vLLM's names, and what is refused."""

import pytest
import zmq
from kvledger.backends.sinks.kv_events.publisher import KVEventPublisher
from kvledger.backends.sinks.kv_events.schema import AllBlocksCleared, BlockRemoved, KVEventsConfig
from kvledger.core.errors import InputError, MisuseError
from kvledger.core.events import Commit


def test_the_options_of_vllm_are_taken() -> None:
    text = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": '
        '"tcp://*:5558", "buffer_steps": 10, "hwm": 20, "max_queue_size": 30, "topic": "kv"}'
    )
    config = KVEventsConfig.parse(text)
    assert config == KVEventsConfig(
        True, "zmq", "tcp://*:5557", "tcp://*:5558", buffer_steps=10, hwm=20, max_queue_size=30, topic="kv"
    )
    assert config.is_on
    assert KVEventsConfig() == KVEventsConfig.parse("{}")
    assert (KVEventsConfig().buffer_steps, KVEventsConfig().hwm, KVEventsConfig().max_queue_size) == (
        *(10_000, 100_000, 100_000),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "must be a JSON object"),
        ('{"port": 1}', "has no 'port'; it has buffer_steps, describes_itself"),
        ('{"publisher": "kafka"}', "publisher must be null or zmq"),
        ('{"hwm": 0}', "hwm must be at least 1, not 0"),
        ('{"buffer_steps": "many"}', "buffer_steps must be at least 1, not many"),
        ('{"endpoint": 5557}', "endpoint must be a text, not 5557"),
        ('{"enable_kv_cache_events": "yes"}', "must be true or false, not 'yes'"),
    ],
)
def test_what_it_does_not_have_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        KVEventsConfig.parse(text)


@pytest.mark.parametrize("config", [KVEventsConfig(enable_kv_cache_events=False), KVEventsConfig(publisher="null")])
def test_a_publisher_that_is_off_takes_everything_and_sends_nothing(config: KVEventsConfig) -> None:
    with KVEventPublisher(config) as publisher:
        assert publisher.endpoint is None
        for _ in range(10):
            publisher.publish([AllBlocksCleared()])


def test_an_endpoint_that_is_taken_is_refused_by_name() -> None:
    with KVEventPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:*")) as publisher:
        taken = publisher.endpoint
        assert taken is not None
        config = KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint=taken)
        with pytest.raises(InputError, match=f"cannot bind {taken}"):
            KVEventPublisher(config)


def test_a_publisher_without_an_encoder_takes_no_commits() -> None:
    publisher = KVEventPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:*"))
    with pytest.raises(MisuseError, match="no encoder"):
        publisher.apply(Commit(0, ()))
    publisher.close()
    with pytest.raises(MisuseError, match="is closed"):
        publisher.publish([AllBlocksCleared()])


@pytest.mark.timeout(60)
def test_a_batch_that_cannot_be_encoded_is_told_to_the_next_caller_and_takes_no_number() -> None:
    config = KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
    with KVEventPublisher(config) as publisher:
        publisher.publish([BlockRemoved([2**70])])
        with pytest.raises(InputError, match="cannot be encoded"):
            for _ in range(10_000):
                publisher.publish([])
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(publisher.replay_endpoint)
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            assert socket.poll(10_000)
            assert socket.recv_multipart()[-2] in ((0).to_bytes(8, "big"), b"\xff" * 8)
            socket.close(linger=0)

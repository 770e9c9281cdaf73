"""How KV events are published, under the names of vLLM's `--kv-events-config`."""

import json
from typing import Any

import attrs

from ...core.errors import InputError


def _at_least_one(_: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if value < 1:
        raise InputError(f"{attribute.name} must be at least 1, not {value}")


@attrs.frozen
class KVEventsConfig:
    """Where and how events leave.

    Attributes:
        enable_kv_cache_events: whether they do at all.
        publisher: "zmq", or "null" for nobody; None: "zmq" if enabled.
        endpoint: where subscribers connect; bound if it names no single host ("tcp://*:5557", "ipc://...").
        replay_endpoint: where they ask for batches again; None: nowhere.
        buffer_steps: batches kept for that.
        hwm: messages kept for a subscriber that is slow.
        max_queue_size: batches that wait to be sent before `publish` waits too.
        topic: first frame of every message.
        describes_itself: whether the replay endpoint also gives the whole state as events to those who ask for it
            (ours: vLLM's does not), for readers that replay cannot reach. Keeps the token ids of every block.
    """

    enable_kv_cache_events: bool = True
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = attrs.field(default=10_000, validator=_at_least_one)
    hwm: int = attrs.field(default=100_000, validator=_at_least_one)
    max_queue_size: int = attrs.field(default=100_000, validator=_at_least_one)
    topic: str = ""
    describes_itself: bool = False

    def __attrs_post_init__(self) -> None:
        if self.publisher not in (None, "null", "zmq"):
            raise InputError(f"publisher must be null or zmq, not {self.publisher!r}")

    @property
    def is_on(self) -> bool:
        """Whether anything is to be published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def parse(cls, text: str) -> "KVEventsConfig":
        """The JSON object that `--kv-events-config` takes.

        Raises:
            InputError: no JSON object, or an option that there is not.
        """
        try:
            given: Any = json.loads(text)
        except ValueError as error:
            raise InputError(f"--kv-events-config is no JSON: {error}") from None
        names = {field.name for field in attrs.fields(cls)}
        if not isinstance(given, dict):
            raise InputError(f"--kv-events-config is {text}; it must be a JSON object")
        unknown = sorted(set(given) - names)
        if unknown:
            raise InputError(f"--kv-events-config has no {unknown[0]!r}; it has {', '.join(sorted(names))}")
        try:
            return cls(**given)
        except TypeError as error:
            raise InputError(f"--kv-events-config {text}: {error}") from None

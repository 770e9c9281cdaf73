"""The keys of a live run's requests, as far as its log has them."""

from collections import defaultdict, deque
from collections.abc import Sequence

from ..backends.sinks.log_reader import LogReader
from ..backends.sinks.log_rows import LoggedCommit, RequestArrived, RequestEnded
from ..core.events import BlocksCached, Key, RowsAssigned, as_ints


class LoggedKeys:
    """A request's keys: those of its prompt stand in its `RequestArrived`, those of its output in its `RequestEnded`.

    Of a request that has no end in the log (the engine was killed, or still runs) the keys that its output's blocks
    were registered under are taken from the commits, which are all that any later lookup could find.

    Attributes:
        num_unended: requests without an end in the log.
    """

    def __init__(self, reader: LogReader) -> None:
        """Read the notes once, and the commits if a request has no end."""
        # An id may be used again after its request's end.
        self._ends: defaultdict[str, deque[RequestEnded]] = defaultdict(deque)
        arrived: list[RequestArrived] = []
        for logged in reader.notes():
            if isinstance(logged.note, RequestEnded):
                self._ends[logged.note.request_id].append(logged.note)
            elif isinstance(logged.note, RequestArrived):
                arrived.append(logged.note)
        self.num_unended = len(arrived) - sum(len(ends) for ends in self._ends.values())
        self._registered = _registered_keys(reader) if self.num_unended else {}

    def of(self, note: RequestArrived) -> tuple[Key, ...]:
        """The keys of a request's complete blocks; to be asked once for each request, in the order of the log."""
        ends = self._ends[note.request_id]
        if ends:
            return note.prompt_keys + ends.popleft().output_keys
        keys = list(note.prompt_keys)
        registered = self._registered.get(note.request_id, {})
        while len(keys) in registered:
            keys.append(registered[len(keys)])
        return tuple(keys)


class KnownKeys:
    """A key source over keys that are all known."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self._keys = keys

    def keys(self, start: int, stop: int) -> Sequence[Key]:
        """Those of blocks `start <= i < stop` that there are."""
        return self._keys[start:stop]


def _registered_keys(reader: LogReader) -> dict[str, dict[int, Key]]:
    """Request -> logical index -> key, of blocks as large as hash blocks; of an id used again, its last request's."""
    hash_block_size = reader.created.hash_block_size
    groups = [group for group, kind in enumerate(reader.created.groups) if kind.block_size == hash_block_size]
    request_in: dict[int, str] = {}
    found: dict[str, dict[int, Key]] = defaultdict(dict)
    for record in reader.records():
        for event in record.commit.events if isinstance(record, LoggedCommit) else ():
            if isinstance(event, RowsAssigned):
                request_in.update(zip(as_ints(event.rows), event.requests, strict=True))
            elif isinstance(event, BlocksCached) and event.group in groups:
                start = 0
                indices = as_ints(event.indices)
                for row, count in zip(as_ints(event.rows), as_ints(event.counts), strict=True):
                    stop = start + count
                    of_request = found[request_in[row]]
                    of_request.update(zip(indices[start:stop], event.keys[start:stop], strict=True))
                    start = stop
    return found

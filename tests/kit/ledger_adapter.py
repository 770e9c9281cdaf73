"""Our own allocator under test, and the managers that differ from it in the eviction order alone."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import kvledger.core
import kvledger.core.pool.eviction_order
import numpy as np
from kvledger.testing.key_fold import KeyFold
from kvledger.testing.protocol import FoundPrefix, Limits, NeverFitsError, Placement, RefusedError, Supports, supporting
from kvledger.testing.scenario import GroupShape, Scenario
from kvledger.testing.view import AllocatorView, view_of

EVERY_OPTION = (
    "eagle",
    "external",
    "async_loads",
    "retention",
    "lookahead",
    "drafts",
    "rollback",
    "reserved",
    "watermark",
    "deferred",
    "drop_orphans",
    "no_caching",
    "ordered",
    "tail_first",
    "refuses_for_good",
)


class PrefixKeys:
    """A key source without hashing: a block's key is all tokens up to its end, which no two contents share."""

    def __init__(self, tokens: Sequence[int], hash_block_size: int) -> None:
        self.tokens = list(tokens)
        self.hash_block_size = hash_block_size

    def keys(self, start: int, stop: int) -> list[tuple[int, ...]]:
        """The keys of the complete hash blocks `start <= i < stop`."""
        size = self.hash_block_size
        return [tuple(self.tokens[: (i + 1) * size]) for i in range(start, min(stop, len(self.tokens) // size))]


class LedgerAdapter:
    """`KVCacheAllocator` behind the protocol; its log rebuilds the state.

    `core` is the package to take the allocator from: the kit's own tests put faults into a copy of it.
    """

    def __init__(
        self,
        scenario: Scenario,
        core: ModuleType = kvledger.core,
        eviction: Callable[[int], Any] | None = None,
    ) -> None:
        self._core = core
        self._eviction = eviction
        config = core.AllocatorConfig(
            num_blocks=scenario.num_blocks,
            groups=[self._kind_of(group) for group in scenario.groups],
            max_model_len=scenario.max_model_len,
            max_num_reqs=scenario.max_num_reqs,
            enable_caching=scenario.enable_caching,
            use_eagle=scenario.use_eagle,
            retention_interval=scenario.retention_interval,
            watermark_blocks=scenario.watermark_blocks,
            release=scenario.release,
            orphans=scenario.orphans,
            eviction=scenario.eviction,
        )
        self.log = core.EventLog()
        self._told = KeyFold([group.block_size for group in scenario.groups])
        order = None if eviction is None else eviction(scenario.num_blocks)
        self.allocator = core.KVCacheAllocator(config, [self.log, self._told], order)
        self._requests: dict[str, Any] = {}

    def match(self, request_id: str, tokens: Sequence[int]) -> FoundPrefix:
        found = self.allocator.match_prefix(self._request(request_id, tokens))
        return FoundPrefix(found.num_hit_tokens, found, found.blocks)

    def can_admit(self, request_id: str, tokens: Sequence[int], found: FoundPrefix | None, limits: Limits) -> bool:
        request = self._request(request_id, tokens)
        return self.allocator.can_admit(
            request,
            found.handle if found else None,
            use_watermark=limits.use_watermark,
            reserved_blocks=limits.reserved_blocks,
        )

    def allocate(self, placement: Placement, found: FoundPrefix | None, limits: Limits) -> bool:
        request = self._request(placement.request_id, placement.tokens)
        goes_on = not self.allocator.holds(placement.request_id) or (
            placement.start == self.allocator.num_placed_tokens(placement.request_id)
        )
        with self._refusals():
            taken = self.allocator.allocate(
                request,
                placement.num_new_tokens,
                found.handle if found else None,
                num_computed_tokens=None if goes_on else placement.start,
                num_external_tokens=placement.num_external_tokens,
                num_lookahead_tokens=limits.num_lookahead_tokens,
                reserved_blocks=limits.reserved_blocks,
                use_watermark=limits.use_watermark,
            )
        return taken is not None

    def append(self, placements: Sequence[Placement], limits: Limits) -> bool:
        with self._refusals():
            rows = [self.allocator.row_of(placement.request_id) for placement in placements]
            for placement in placements:
                self._request(placement.request_id, placement.tokens)
            starts = [placement.start for placement in placements]
            goes_on = starts == [self.allocator.state.placed[row] for row in rows]
            new = np.array([placement.num_new_tokens for placement in placements], dtype=np.int64)
            known = np.array([len(placement.tokens) for placement in placements], dtype=np.int64)
            first = np.array(starts, dtype=np.int64)
            return self.allocator.append(
                np.array(rows, dtype=np.int64),
                new,
                num_draft_tokens=np.maximum(first + new - known, 0),
                num_lookahead_tokens=limits.num_lookahead_tokens,
                reserved_blocks=limits.reserved_blocks,
                first_positions=None if goes_on else first,
            )

    def release_out_of_window(self, request_id: str, num_computed_tokens: int) -> None:
        with self._refusals():
            self.allocator.release_out_of_window(request_id, num_computed_tokens)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        with self._refusals():
            self.allocator.truncate(request_id, num_tokens)

    def fork(self, parent_id: str, child_id: str, tokens: Sequence[int]) -> None:
        is_new = child_id not in self._requests
        try:
            with self._refusals():
                self.allocator.fork(parent_id, self._request(child_id, tokens))
        except RefusedError:
            if is_new:  # another request may come by this name, with a prompt of its own
                del self._requests[child_id]
            raise

    def free(self, request_id: str) -> None:
        with self._refusals():
            self.allocator.free(request_id)
        del self._requests[request_id]

    def preempt(self, request_id: str) -> None:
        with self._refusals():
            self.allocator.preempt(request_id)

    def abort(self, request_id: str) -> None:
        if self.allocator.abort(request_id):
            del self._requests[request_id]

    def evict(self, blocks: Sequence[int]) -> None:
        with self._refusals():
            self.allocator.evict(blocks)

    def reset(self) -> None:
        with self._refusals():
            self.allocator.reset_prefix_cache()

    def release_blocks(self, blocks: Sequence[int]) -> None:
        with self._refusals():
            self.allocator.pool.release(tuple(blocks))

    def view(self) -> AllocatorView:
        return view_of(self.allocator.state, key_prefix=_prefix_of)

    def rebuild(self) -> tuple[Any, Any]:
        order = None if self._eviction is None else self._eviction(self.allocator.config.num_blocks)
        live, rebuilt = self.allocator.state.snapshot(), self.log.replay(eviction=order).snapshot()
        index = enumerate(live["copies"])
        live |= {"told": {(group, key): len(found) for group, keys in index for key, found in keys}}
        live |= {"wrong parents": []}
        return live, rebuilt | {"told": self._told.findable(), "wrong parents": self._told.wrong_parents}

    # -- requests and errors -----------------------------------------------------------------------------------------

    def _request(self, request_id: str, tokens: Sequence[int]) -> Any:
        request = self._requests.get(request_id)
        if request is None:
            keys = PrefixKeys(tokens, self.allocator.config.hash_block_size)
            request = self._core.Request(request_id, len(tokens), max_tokens=1 << 30, keys=keys)
            self._requests[request_id] = request
        request.keys.tokens = list(tokens)
        request.num_output_tokens = len(tokens) - request.num_prompt_tokens
        return request

    def _kind_of(self, group: GroupShape) -> Any:
        core, size, span = self._core, group.block_size, group.span
        match group.kind:
            case "sliding":
                return core.SlidingWindow(size, span)
            case "chunked":
                return core.ChunkedLocal(size, span)
            case "compressed":
                return core.CompressedState(size, span)
            case "state":
                return core.SequenceState(size)
            case _:
                return core.FullAttention(size)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except self._core.DoesNotFitError as error:
            raise NeverFitsError(str(error)) from error
        except (self._core.MisuseError, self._core.InputError) as error:
            raise RefusedError(str(error)) from error


def _prefix_of(key: Hashable) -> Sequence[int]:
    assert isinstance(key, tuple)
    return key


def ledger_supports(**changes: Any) -> Supports:
    """What our allocator supports: everything that the kit knows."""
    settings: dict[str, Any] = {
        "kinds": ("full", "sliding", "chunked", "compressed", "state"),
        "max_groups": 3,
        "options": EVERY_OPTION,
    }
    return Supports(**(settings | changes))


@supporting(ledger_supports())
def make_ledger(scenario: Scenario) -> LedgerAdapter:
    """Our allocator: `pytest --kvledger-allocator kvledger.testing:make_ledger`."""
    return LedgerAdapter(scenario)

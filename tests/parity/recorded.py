"""Drives our allocator by recorded operations and compares every recorded output (reference: golden/ops)."""

import gzip
import json
from pathlib import Path
from typing import Any

from kvledger.core.allocator.allocator import KVCacheAllocator
from kvledger.core.allocator.config import AllocatorConfig
from kvledger.core.cache_kinds import CacheKind, ChunkedLocal, FullAttention, SequenceState, SlidingWindow
from kvledger.core.errors import DoesNotFitError, MisuseError
from kvledger.core.events import FreeReason
from kvledger.core.ledger.event_log import EventLog
from kvledger.core.types import Request

STREAM = 1_000_000
REASONS = {"finish": FreeReason.FINISHED, "preempt": FreeReason.PREEMPTED, "abort": FreeReason.ABORTED}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


class PrefixKeys:
    """A key source without hashing: a block's key is all tokens up to its end, which no two contents share."""

    def __init__(self, tokens: list[int], hash_block_size: int, num_lookahead_tokens: int = 0) -> None:
        self.tokens = tokens
        self.hash_block_size = hash_block_size
        self.ahead = num_lookahead_tokens

    def keys(self, start: int, stop: int) -> list[tuple[int, ...]]:
        size, ahead = self.hash_block_size, self.ahead
        stop = min(stop, (len(self.tokens) - ahead) // size)
        return [tuple(self.tokens[: (i + 1) * size + ahead]) for i in range(start, stop)]


def kind_of(group: dict[str, Any]) -> CacheKind:
    if group["kind"] == "sliding":
        return SlidingWindow(group["block_size"], group["sliding_window"])
    if group["kind"] == "chunked":
        return ChunkedLocal(group["block_size"], group["attention_chunk_size"])
    if group["kind"] == "state":
        return SequenceState(group["block_size"])
    return FullAttention(group["block_size"])


class Recorded:
    """Drives our allocator by the recorded operations and compares every recorded output."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header
        self.log = EventLog()
        self.allocator = KVCacheAllocator(
            AllocatorConfig(
                num_blocks=header["num_blocks"],
                groups=[kind_of(group) for group in header["groups"]],
                max_model_len=header["max_model_len"],
                max_num_reqs=1024,
                enable_caching=header["enable_caching"],
                retention_interval=header["retention_interval"],
                max_in_flight_tokens=header["max_in_flight_tokens"],
                watermark_blocks=header["watermark_blocks"],
                use_eagle=header["use_eagle"],
                num_lookahead_tokens=header.get("num_lookahead_tokens", 0),
                hash_block_size=header["hash_block_size"],
                scheduler_block_size=header["scheduler_block_size"],
            ),
            sinks=[self.log],
        )
        assert self.allocator.num_free_blocks == header["free_after_init"]
        self.windowed = any(group["kind"] != "full" for group in header["groups"])
        self.requests: dict[int, Request] = {}
        self.outputs: dict[int, int] = {}
        self.matches: dict[int, Any] = {}
        self.compared = 0

    def run(self, operations: list[dict[str, Any]]) -> None:
        for op in operations:
            getattr(self, op["op"])(op)
            assert self.allocator.num_free_blocks == op["free"], op
            self.compared += 1

    def new(self, op: dict[str, Any]) -> None:
        tokens = [s * STREAM + j for s, start, length in op["prompt"] for j in range(start, start + length)]
        keys = PrefixKeys(tokens, self.header["hash_block_size"], self.header.get("num_lookahead_tokens", 0))
        self.requests[op["r"]] = Request(str(op["r"]), len(tokens), max_tokens=STREAM, keys=keys)
        self.outputs[op["r"]] = op["out"]

    def lookup(self, op: dict[str, Any]) -> None:
        request = self.requests[op["r"]]
        assert request.num_tokens == op["num_tokens"], op
        match = self.allocator.match_prefix(request)
        assert [list(blocks) for blocks in match.blocks] == op["blocks"], op
        assert match.num_hit_tokens == op["hit"], op
        assert match.boundary == op["boundary"], op
        self.matches[op["r"]] = match

    def alloc(self, op: dict[str, Any]) -> None:
        request = self.requests[op["r"]]
        self.append_outputs(request, op["append"])
        running = op["status"] == "running"
        match = None if running else self.matches.pop(op["r"], None)
        taken = self.allocate(request, op, match, watermark=not running and op.get("has_sched", True))
        assert request.num_tokens == op["num_tokens"], op
        assert (None if taken is None else [list(blocks) for blocks in taken]) == op["blocks"], op
        held = self.allocator.holds(request.request_id)
        tables = self.allocator.block_ids(request.request_id) if held else [[] for _ in self.header["groups"]]
        assert [len(table) for table in tables] == op["held"], op
        if "table" in op:
            assert tables == op["table"], op
        self.append_outputs(request, op.get("accepted", 0))

    def append_outputs(self, request: Request, count: int) -> None:
        for _ in range(count):
            request.keys.tokens.append(self.outputs[int(request.request_id)] * STREAM + request.num_output_tokens)
            request.num_output_tokens += 1

    def allocate(self, request: Request, op: dict[str, Any], match: Any, watermark: bool) -> Any:
        """vLLM's one call is three steps here: the full-sequence gate, out-of-window release, allocate."""
        if op.get("full_fit") and not self.allocator.can_admit(request, match, use_watermark=watermark):
            return None
        if self.allocator.holds(request.request_id):
            self.allocator.release_out_of_window(request.request_id, op["computed"])
        try:
            return self.allocator.allocate(
                request,
                op["new"],
                match,
                num_computed_tokens=op["computed"],
                num_lookahead_tokens=op.get("lookahead", 0),
                reserved_blocks=op.get("reserved", 0),
                use_watermark=watermark,
            )
        except DoesNotFitError:
            return None

    def free(self, op: dict[str, Any]) -> None:
        if self.allocator.holds(str(op["r"])):
            self.allocator.free(str(op["r"]), REASONS[op["why"]])

    def reset(self, op: dict[str, Any]) -> None:
        try:
            self.allocator.reset_prefix_cache()
            done = True
        except MisuseError:
            done = False
        assert done == op["ok"], op

    def evict(self, op: dict[str, Any]) -> None:
        self.allocator.evict([op["id"]])

    def snapshot(self, op: dict[str, Any]) -> None:
        pool = self.allocator.pool
        assert pool.free_queue.order() == op["free_queue"], op["i"]
        assert [[block, count] for block, count in enumerate(pool.ref_cnts()) if count] == op["refs"], op["i"]
        ahead = self.header.get("num_lookahead_tokens", 0)
        assert [[block, len(key) - ahead] for block, key in pool.keyed_blocks()] == op["cached"], op["i"]
        distinct = {(pool.group_of(block), key) for block, key in pool.keyed_blocks()}
        assert len(distinct) == op["distinct_hashes"], op["i"]

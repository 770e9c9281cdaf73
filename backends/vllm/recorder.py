"""Records what vLLM's own block pool and scheduler decide, without changing a decision.

The engine's process only notes raw facts where a block changes hands, and once a step; a process of its own (writer.py)
turns them into events and writes the log. It outlives an engine that is killed, and then closes the log.
"""

import atexit
import fcntl
import json
import marshal
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.allocator.config import AllocatorConfig
from ...core.errors import InputError
from ...core.scheduler.config import SchedulerConfig
from .config import RECORDER, allocator_config, refuse, refused_options
from .manager import reason_of
from .names import VERSION, KVCacheManager, RequestStatus, VllmAsyncScheduler, VllmScheduler, scheduling
from .plugin import RECORD
from .schedulers import max_num_reqs_of

FLUSH = "KVLEDGER_RECORD_FLUSH"
"""The environment variable of the flush policy: `100ms` (the default), `50commits`, `commit`."""

LENGTH = struct.Struct("<I")
_PIPE_BYTES = 1 << 20
_MOST_UNSENT_BYTES = 1 << 28
# Steps that are shorter than this are sent together.
_GATHER_NS = 10_000_000
_END_REASONS = {RequestStatus.FINISHED_STOPPED: "stop", RequestStatus.FINISHED_LENGTH_CAPPED: "length"}


def install() -> None:
    """Record every scheduler that this process makes from now on."""
    if hasattr(VllmScheduler, "kvledger_records"):
        return
    VllmScheduler.kvledger_records = True
    make = VllmScheduler.__init__

    def make_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        Recorder(self, new_directory(os.environ[RECORD], self.vllm_config)).attach()

    VllmScheduler.__init__ = make_and_record


def new_directory(parent: str, vllm_config: Any) -> Path:
    """Return the directory of one engine's recording: the time of its start, its rank and its process."""
    started = time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime())
    return Path(parent, f"{started}-rank{vllm_config.parallel_config.data_parallel_index}-{os.getpid()}")


def configs_of(scheduler: Any) -> tuple[AllocatorConfig, SchedulerConfig]:
    """Return the configs under which our allocator and scheduler decide what this scheduler of vLLM does.

    Raises:
        InputError: they cannot: what it needs and we do not do.
    """
    config = scheduler.vllm_config
    refuse(RECORDER, refused_options(config))
    allocator = allocator_config(
        scheduler.kv_cache_config,
        scheduler.max_model_len,
        scheduler.block_size,
        scheduler.hash_block_size,
        config.max_in_flight_tokens,
        bool(config.cache_config.enable_prefix_caching),
        scheduler.use_eagle_block_drop,
        config.scheduler_config.watermark,
        max_num_reqs_of(config),
        asks=RECORDER,
    )
    limits = config.scheduler_config
    return allocator, SchedulerConfig(
        max_num_seqs=scheduler.max_num_active_reqs,
        max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        policy=limits.policy,
        num_speculative_tokens=scheduler.num_spec_tokens,
        num_lookahead_tokens=scheduler.num_lookahead_tokens,
        reserve_full_sequence=scheduler.scheduler_reserve_full_isl,
    )


class Recorder:
    """Hooks into one scheduler of vLLM and sends what happens to the process that writes the log.

    A fact is a letter and plain values behind it, in one flat list (writer.py lists them). Facts are sent when a step
    has been decided and before it is computed, those of steps within 10 ms together.
    """

    def __init__(self, scheduler: Any, directory: Path) -> None:
        """Start the writing process.

        Raises:
            InputError: the engine's settings or its manager cannot be recorded, or the log cannot be started.
        """
        if type(scheduler.kv_cache_manager) is not KVCacheManager:
            raise InputError(
                f"{RECORD} is set, but {type(scheduler).__name__} has another manager than vLLM's own, which it "
                f"records: unset {RECORD}, or leave out --scheduler-cls"
            )
        allocator, limits = configs_of(scheduler)
        self._scheduler = scheduler
        self._facts: list[Any] = []
        self._decided_ns: list[int] = []
        self._batch: list[str] = []  # the requests of the last step that still hold blocks, in its order
        self._appends_only = not scheduler.num_spec_tokens  # no draft takes a request back
        self._sent_ns = 0
        self._unsent = bytearray()
        self._num_told = 0  # facts up to the last step that was noted
        about = {"engine": "vllm", "version": VERSION, "model": scheduler.vllm_config.model_config.model}
        about["async_scheduling"] = isinstance(scheduler, VllmAsyncScheduler)
        writer = [sys.executable, "-m", "kvledger.backends.vllm.writer", str(directory)]
        self._process = subprocess.Popen(
            [*writer, os.environ.get(FLUSH, "100ms")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt of the server must not end it before the server's last facts
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = self._process.stdin.fileno()
        fcntl.fcntl(self._pipe, getattr(fcntl, "F_SETPIPE_SZ", 1031), _PIPE_BYTES)
        first = pickle.dumps((allocator, limits, about))
        os.write(self._pipe, LENGTH.pack(len(first)) + first)
        answer = json.loads(self._process.stdout.readline() or "{}")
        if "directory" not in answer:
            raise InputError(f"kvledger cannot record into {directory}: {answer.get('error', 'its writer ended')}")
        os.set_blocking(self._pipe, False)
        scheduling.logger.info("kvledger records into %s", directory)
        atexit.register(self.close)

    def attach(self) -> None:
        """Put the hooks in place: on this scheduler, its manager and its pool alone."""
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        self._hook_pool(manager.block_pool)
        free, add = manager.free, scheduler.add_request
        schedule_done, compute_done = scheduler._update_after_schedule, scheduler.update_from_output
        shutdown = scheduler.shutdown
        facts, note = self._facts, self._facts.extend

        def free_request(request: Any) -> None:
            ended = RequestStatus.is_finished(request.status)
            if ended:
                self._note_end(request)
            request_id = request.request_id
            note(("x", request_id, str(reason_of(request))))
            free(request)
            note(("r", request_id))
            if request_id in self._batch:
                self._batch = self._batch.copy()  # it may be the scheduler's own list
                self._batch.remove(request_id)

        def add_request(request: Any) -> None:
            known = request.request_id in scheduler.requests
            add(request)
            if not known:
                self._note_arrival(request)

        def update_after_schedule(output: Any) -> None:
            now = time.time_ns()
            if output.total_num_scheduled_tokens:
                note(self._step(now, output))
                self._decided_ns.append(now)
            elif self._decided_ns or len(facts) > self._num_told:  # it may have given blocks back, or wait for a step
                note(("s", now, [], [], [], {}))
                self._batch = []
            self._num_told = len(facts)
            if now - self._sent_ns > _GATHER_NS:
                self._sent_ns = now
                self.send()
            schedule_done(output)

        def update_from_output(output: Any, model_output: Any) -> Any:
            if output.total_num_scheduled_tokens and self._decided_ns:
                now = time.time_ns()
                note(("d", now, now - self._decided_ns.pop(0)))
                self._num_told = len(facts)
            result = compute_done(output, model_output)
            if not scheduler.running:
                self.send()
            return result

        def shut_down() -> None:
            shutdown()
            self.close()

        manager.free = free_request
        scheduler.add_request, scheduler.shutdown = add_request, shut_down
        scheduler._update_after_schedule, scheduler.update_from_output = update_after_schedule, update_from_output

    def _hook_pool(self, pool: Any) -> None:
        """Note which blocks change hands. Whose they are is read from the caller, who names no one to the pool."""
        take, adopt, give, store = pool.get_new_blocks, pool.touch, pool.free_blocks, pool.cache_full_blocks
        evict, reset, partly = pool.evict_blocks, pool.reset_prefix_cache, pool.cache_partial_block
        hash_block_size = pool.hash_block_size
        note, caller = self._facts.extend, sys._getframe

        def get_new_blocks(num_blocks: int) -> list[Any]:
            blocks = take(num_blocks)
            if blocks:
                local = caller(1).f_locals
                manager, request_id = local["self"], local["request_id"]
                at = len(manager.req_to_blocks[request_id])
                ids = blocks[0].block_id if num_blocks == 1 else [block.block_id for block in blocks]
                note(("t", manager.kv_cache_group_id, request_id, at, ids))
            return blocks

        def touch(blocks: Sequence[Any]) -> None:
            adopt(blocks)
            local = caller(1).f_locals
            num_nulls = local["num_skipped_blocks"]
            if blocks or num_nulls:
                ids = [block.block_id for block in blocks]
                note(("a", local["self"].kv_cache_group_id, local["request_id"], num_nulls, ids))

        def free_blocks(ordered_blocks: Any) -> None:
            blocks = list(ordered_blocks)
            give(blocks)
            if blocks:
                local = caller(1).f_locals
                ids = [block.block_id for block in blocks if not block.is_null]
                note(("f", local["self"].kv_cache_group_id, local["request_id"], ids))

        def cache_full_blocks(
            request: Any,
            blocks: Any,
            num_cached_blocks: int,
            num_full_blocks: int,
            block_size: int,
            kv_cache_group_id: int,
            block_mask: list[bool] | None = None,
        ) -> None:
            start, stop = num_cached_blocks, num_full_blocks
            store(request, blocks, start, stop, block_size, kv_cache_group_id, block_mask)
            if start >= stop:
                return
            hashes, each = request.block_hashes, block_size // hash_block_size
            parent = hashes[start * each - 1] if start else None
            if stop - start == 1 and block_mask is None and not blocks[start].is_null:  # most decode steps
                key, block = hashes[stop * each - 1], blocks[start].block_id
                note(("c", kv_cache_group_id, request.request_id, start, stop, None, block, key, parent))
                return
            ids = [block.block_id for block in blocks[start:stop]]
            keys = hashes[start:stop] if each == 1 else hashes[(start + 1) * each - 1 : stop * each : each]
            chosen = None
            if block_mask is not None or 0 in ids:
                chosen = [i for i, block in enumerate(ids) if block and (block_mask is None or block_mask[i])]
                ids, keys = [ids[i] for i in chosen], [keys[i] for i in chosen]
            note(("c", kv_cache_group_id, request.request_id, start, stop, chosen, ids, list(keys), parent))

        def cache_partial_block(
            request: Any, block: Any, num_tokens: int, kv_cache_group_id: int, block_size: int, **options: Any
        ) -> Any:
            had = block.block_hash
            key = partly(request, block, num_tokens, kv_cache_group_id, block_size, **options)
            if had is None and block.block_hash is not None:
                index = -(-num_tokens // block_size) - 1
                hashes = request.block_hashes
                of_block = [hashes[num_tokens // hash_block_size - 1]]
                before = index * block_size // hash_block_size
                parent = hashes[before - 1] if before else None
                fact = ("c", kv_cache_group_id, request.request_id, index, index + 1, None, [block.block_id], of_block)
                note((*fact, parent))
            return key

        def evict_blocks(block_ids: set[int]) -> None:
            keyed = [block for block in block_ids if pool.blocks[block].block_hash is not None]
            evict(block_ids)
            note(("e", keyed))

        def reset_prefix_cache() -> bool:
            done = reset()
            if done:
                note(("z",))
            return done

        pool.get_new_blocks, pool.touch, pool.free_blocks = get_new_blocks, touch, free_blocks
        pool.cache_full_blocks, pool.cache_partial_block = cache_full_blocks, cache_partial_block
        pool.evict_blocks, pool.reset_prefix_cache = evict_blocks, reset_prefix_cache

    def _step(self, now_ns: int, output: Any) -> tuple[Any, ...]:
        """Return the fact about a step, without what the writer knows from the step before (see writer.py)."""
        cached, counts = output.scheduled_cached_reqs, output.num_scheduled_tokens
        new = [(each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs]
        others = None if cached.req_ids == self._batch else cached.req_ids
        firsts = None if self._appends_only and not cached.resumed_req_ids else cached.num_computed_tokens
        if output.total_num_scheduled_tokens == len(counts):
            counts = None
        self._batch = cached.req_ids + [request_id for request_id, _ in new] if new else cached.req_ids
        return "s", now_ns, new, others, firsts, counts

    def _note_arrival(self, request: Any) -> None:
        keys = request.block_hashes[: request.num_prompt_tokens // self._scheduler.hash_block_size]
        counts = (request.num_prompt_tokens, request.max_tokens, request.priority)
        self._facts.extend(("q", request.request_id, request.arrival_time, *counts, list(keys)))

    def _note_end(self, request: Any) -> None:
        reason = "abort" if request.status == RequestStatus.FINISHED_ABORTED else "error"
        keys = request.block_hashes[request.num_prompt_tokens // self._scheduler.hash_block_size :]
        reason = _END_REASONS.get(request.status, reason)
        self._facts.extend(("n", request.request_id, reason, request.num_output_tokens, list(keys)))

    # -- the pipe ----------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send the facts so far, as far as the pipe takes them now; the engine waits for its writer only in `close`.

        What the pipe has taken is logged whatever becomes of this process. Facts after the recording's end are dropped.
        """
        if self._pipe < 0:
            self._facts.clear()
            self._num_told = 0
            return
        if self._facts:
            # Version 2 looks for no repeated objects, which takes longer than to write them again.
            message = marshal.dumps(self._facts, 2)
            self._facts.clear()
            self._num_told = 0
            self._unsent += LENGTH.pack(len(message)) + message
        if self._unsent:
            try:
                del self._unsent[: os.write(self._pipe, self._unsent)]
            except BlockingIOError:
                if len(self._unsent) > _MOST_UNSENT_BYTES:
                    self._give_up("it is too slow")
            except OSError as error:
                self._give_up(str(error))

    def close(self) -> None:
        """Send the last facts and wait until the log is closed. A second call does nothing."""
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return
        os.set_blocking(stdin.fileno(), True)
        self.send()
        while self._unsent:
            self.send()
        stdin.close()
        self._process.wait()

    def _give_up(self, why: str) -> None:
        """End the recording; the server goes on."""
        scheduling.logger.error("kvledger's recording ends here, because its writer has failed: %s", why)
        self._pipe = -1
        self._unsent.clear()

"""The process that writes the log of a recorded vLLM engine: `python -m kvledger.backends.vllm.writer DIRECTORY FLUSH`.

It reads facts from its standard input until the engine closes it or dies. A message is its length (4 bytes, little
endian) and its content: first a pickle of the configs, then `marshal` of a list of facts, which follow each
other without a mark between them. A fact is one of

    "q", request, arrival_s, prompt tokens, max_tokens, priority, prompt keys   a request has arrived
    "a", group, request, null blocks in front, blocks                           cached blocks are adopted
    "t", group, request, entries before them, blocks                            blocks are taken from the free queue
    "c", group, request, start, stop, chosen places or None, blocks, keys, parent key   blocks become findable
    "f", group, request, blocks                                                 blocks are given back
    "x", request, reason ... "r", request                                       a request gives everything back
    "e", blocks; "z"                                                            keys are dropped: of blocks; all
    "s", time_ns, [(new request, first position)], [other requests], [first positions], {request: tokens}   a step;
        None for the requests of the step before without those that have left; for positions that follow those of the
        request's last step; for one token each
    "d", time_ns, nanoseconds                                                   a step is computed
    "n", request, reason, output tokens, output keys                            a request has ended

In "t" and "c" a single block and its key stand without a list.
"""

import json
import marshal
import os
import pickle
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

import attrs
import numpy as np

from ...core.allocator.config import AllocatorConfig
from ...core.errors import KVLedgerError
from ...core.events import (
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksUncached,
    CacheReset,
    Commit,
    Event,
    FreeReason,
    Key,
    PoolCreated,
    PrefixAdopted,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
)
from ...core.types import StepLoad
from ..serving.engine.recording import RECORDED_VLLM, live_header
from ..sinks.log.durable_log import Clock, DurableLog
from ..sinks.log.flush_policy import FlushPolicy
from ..sinks.log.rows import RequestArrived, RequestEnded, RunEnded, StepComputed

_LENGTH = struct.Struct("<I")


@attrs.define
class EngineTime:
    """The engine's time of the fact that is being logged, in nanoseconds since 1970."""

    ns: int


class EngineLog:
    """Turns facts into commits and notes, and writes them to a log.

    Facts about one request that follow each other are one commit. It follows the block tables and the keys of the
    blocks, and trusts the engine in everything: whether that was right is for `kvledger log verify` to say.
    """

    def __init__(self, log: DurableLog, config: AllocatorConfig, now: EngineTime) -> None:
        self._log = log
        self._now = now
        # By letter: the method, and how many values follow the letter.
        self._apply_fact = {
            "q": (self._arrived, 6),
            "a": (self._adopted, 4),
            "t": (self._taken, 4),
            "c": (self._cached, 8),
            "f": (self._freed, 3),
            "x": (self._leaving, 2),
            "r": (self._left, 1),
            "e": (self._evicted, 1),
            "z": (self._reset, 0),
            "s": (self._scheduled, 5),
            "d": (self._computed, 2),
            "n": (self._ended, 4),
        }
        self._sequence = 0
        self._events: list[Event] = []
        self._owner: str | None = None
        self._several_groups = len(config.groups) > 1
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(config.max_num_reqs - 1, -1, -1))
        self._tables: list[dict[int, list[int]]] = [{} for _ in config.groups]
        self._key_of: dict[int, tuple[Key, int]] = {}
        self._reason: FreeReason | None = None
        self._num_prompt_tokens: dict[str, int] = {}
        self._loads: list[StepLoad] = []
        self._batch: list[str] = []  # the requests of the last step that have not left
        self._next_position: dict[str, int] = {}
        self._num_requests = 0
        created = PoolCreated(
            num_blocks=config.num_blocks,
            groups=config.groups,
            max_num_reqs=config.max_num_reqs,
            max_model_len=config.max_model_len,
            enable_caching=config.enable_caching,
            hash_block_size=config.hash_block_size,
            scheduler_block_size=config.scheduler_block_size,
            eviction=config.eviction,
            key_algorithm=config.key_algorithm,
        )
        self._events.append(created)
        self._commit()

    def apply(self, facts: list[Any]) -> None:
        """Log the facts of one message."""
        at = 0
        while at < len(facts):
            method, count = self._apply_fact[facts[at]]
            method(*facts[at + 1 : at + 1 + count])
            at += 1 + count
        self._commit()

    def close(self) -> None:
        """Note the end of the run and close the log."""
        self._log.note(RunEnded({"num_requests": self._num_requests}))
        self._log.close()

    # -- facts about blocks ------------------------------------------------------------------------------------------

    def _adopted(self, group: int, request: str, num_nulls: int, blocks: list[int]) -> None:
        row = self._row(request)
        table = (0,) * num_nulls + tuple(blocks)
        self._tables[group].setdefault(row, []).extend(table)
        self._events.append(PrefixAdopted(group, row, table))

    def _taken(self, group: int, request: str, at: int, blocks: list[int] | int) -> None:
        if isinstance(blocks, int):
            blocks = [blocks]
        row = self._row(request)
        table = self._tables[group].setdefault(row, [])
        entries = (0,) * (at - len(table)) + tuple(blocks)
        table.extend(entries)
        lost = [self._key_of.pop(block, None) for block in entries]
        lost_keys: tuple[Key | None, ...] = ()
        lost_groups: tuple[int, ...] = ()
        if any(lost):
            lost_keys = tuple([each and each[0] for each in lost])
            if self._several_groups:
                lost_groups = tuple([each[1] if each else 0 for each in lost])
        self._events.append(BlocksAllocated.of_row(group, row, entries, lost_keys, lost_groups))

    def _cached(
        self,
        group: int,
        request: str,
        start: int,
        stop: int,
        chosen: list[int] | None,
        blocks: list[int] | int,
        keys: Any,
        parent: Key | None,
    ) -> None:
        if isinstance(blocks, int):
            blocks, keys = [blocks], [keys]
        row = self._row(request)
        self._key_of.update(zip(blocks, [(key, group) for key in keys], strict=True))
        if chosen is None:
            event = BlocksCached.of_row(group, row, start, stop, tuple(blocks), tuple(keys), parent)
        else:
            indices = tuple([start + place for place in chosen])
            columns = (row,), (start,), (stop,), (len(blocks),), indices, tuple(blocks), tuple(keys), (parent,)
            event = BlocksCached(group, *columns)
        self._events.append(event)

    def _freed(self, group: int, request: str, blocks: list[int]) -> None:
        row = self._row(request)
        table = self._tables[group].setdefault(row, [])
        if self._reason is not None:
            self._events.append(BlocksFreed.of_row(self._reason, group, row, tuple(blocks)))
            table.clear()
        elif blocks:
            # An index that the table does not have tells `verify` that the request did not hold the block.
            indices = tuple([table.index(block) if block in table else len(table) for block in blocks])
            self._events.append(BlocksFreed.of_row(FreeReason.OUT_OF_WINDOW, group, row, tuple(blocks), indices))
            for index in indices:
                table[index : index + 1] = [0] * (index < len(table))

    def _leaving(self, request: str, reason: str) -> None:
        self._commit()
        self._reason = FreeReason(reason)

    def _left(self, request: str) -> None:
        self._reason = None
        if request in self._batch:
            self._batch.remove(request)
        row = self._row_of.pop(request, None)
        if row is not None:
            self._events.append(RowsReleased.of(request, row))
            self._free_rows.append(row)
            for tables in self._tables:
                tables.pop(row, None)
        self._commit()

    def _evicted(self, blocks: list[int]) -> None:
        self._commit()
        lost = [self._key_of.pop(block) for block in blocks if block in self._key_of]
        if lost:
            keys, groups = zip(*lost, strict=True)
            self._events.append(BlocksUncached(tuple(blocks), keys, groups))

    def _reset(self) -> None:
        self._commit()
        self._key_of.clear()
        self._events.append(CacheReset())

    # -- facts about requests and steps ------------------------------------------------------------------------------

    def _arrived(
        self, request: str, arrival: float, num_prompt: int, max_tokens: int, priority: int, keys: list[Key]
    ) -> None:
        self._commit()
        self._num_requests += 1
        self._now.ns = max(self._now.ns, round(arrival * 1e9))
        self._num_prompt_tokens[request] = num_prompt
        facts = {"max_tokens": max_tokens, "priority": priority}
        self._log.note(RequestArrived(request, arrival, num_prompt, prompt_keys=tuple(keys), facts=facts))

    def _ended(self, request: str, reason: str, num_output_tokens: int, keys: list[Key]) -> None:
        self._commit()
        self._num_prompt_tokens.pop(request, None)
        self._next_position.pop(request, None)
        self._log.note(RequestEnded(request, reason, num_output_tokens, tuple(keys)))

    def _scheduled(
        self,
        now_ns: int,
        new: list[tuple[str, int]],
        others: list[str] | None,
        firsts: list[int] | None,
        counts: dict[str, int] | None,
    ) -> None:
        self._commit()
        self._now.ns = now_ns
        others = self._batch if others is None else others
        self._batch = [*others, *[name for name, _ in new]]
        if firsts is None:
            firsts = [self._next_position[name] for name in others]
        starts = [*zip(others, firsts, strict=True), *new]
        batch = [(name, first, counts[name] if counts else 1) for name, first in starts]
        self._next_position.update([(name, first + count) for name, first, count in batch])
        placed = [(self._row_of[name], first, count) for name, first, count in batch if name in self._row_of]
        columns = np.array(placed, dtype=np.int64).reshape(-1, 3).T.copy()
        self._events.append(TokensPlaced.of_batch(*columns))
        if batch:
            self._loads.append(self._load(batch))

    def _load(self, batch: list[tuple[str, int, int]]) -> StepLoad:
        prefill = decode = prefill_context = decode_context = sampled = 0
        for name, first, count in batch:
            num_prompt = self._num_prompt_tokens.get(name, 0)
            context = first * count + count * (count + 1) // 2
            if first >= num_prompt or count == 1:
                decode, decode_context = decode + count, decode_context + context
            else:
                prefill, prefill_context = prefill + count, prefill_context + context
            sampled += first + count >= num_prompt
        return StepLoad(prefill, decode, prefill_context, decode_context, sampled)

    def _computed(self, now_ns: int, nanoseconds: int) -> None:
        self._commit()
        self._now.ns = now_ns
        self._log.note(StepComputed(nanoseconds, self._loads.pop(0)))

    # -- rows and commits --------------------------------------------------------------------------------------------

    def _row(self, request: str) -> int:
        if request != self._owner:
            self._commit()
            self._owner = request
        row = self._row_of.get(request)
        if row is None:
            row = self._row_of[request] = self._free_rows.pop()
            self._events.append(RowsAssigned.of(request, row))
        return row

    def _commit(self) -> None:
        self._owner = None
        if self._events:
            events, self._events = tuple(self._events), []
            self._log.apply(Commit(self._sequence, events))
            self._sequence += 1


def messages(stream: BinaryIO) -> Iterator[bytes]:
    """Read whole messages; one that the engine did not finish is left out."""
    while len(length := stream.read(_LENGTH.size)) == _LENGTH.size:
        message = stream.read(_LENGTH.unpack(length)[0])
        if len(message) < _LENGTH.unpack(length)[0]:
            return
        yield message


def main(directory: str, flush: str) -> int:
    """Write the log that the standard input describes; answer with its directory or with what is wrong."""
    os.nice(10)  # the engine's scheduler goes first where cores are few
    stream = messages(sys.stdin.buffer)
    allocator, limits, about = pickle.loads(next(stream))
    now = EngineTime(time.time_ns())
    clock = Clock("unix", lambda: now.ns)
    try:
        header = live_header(allocator, limits, about, RECORDED_VLLM)
        durable = DurableLog.create(directory, flush=FlushPolicy.parse(flush), clock=clock, header=header)
    except KVLedgerError as error:
        answer(error=str(error))
        return 2
    log = EngineLog(durable, allocator, now)
    durable.flush()  # from here on there is a log that verifies, whoever is killed
    answer(directory=directory)
    for message in stream:
        log.apply(marshal.loads(message))
    log.close()
    return 0


def answer(**fields: str) -> None:
    """Tell the engine, which waits for one line, unless it has died meanwhile."""
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

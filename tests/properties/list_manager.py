"""A block manager in lists, with the rules of one group of full attention and nothing clever: slow, and easy to check.

It shares no code with the allocator, so it serves as the rival in differential runs, and as the worked example of how
small a manager under test can be.
"""

from collections import Counter
from collections.abc import Sequence

from kvledger.testing import (
    AllocatorView,
    FoundPrefix,
    Limits,
    NeverFitsError,
    Placement,
    RefusedError,
    Scenario,
    Supports,
    supporting,
)

Prefix = tuple[int, ...]


class ListManager:
    """Free queue, reference counts and registered prefixes as plain lists and dicts."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.size = scenario.block_size
        self.free_queue = list(range(1, scenario.num_blocks))
        self.ref_cnt = [0] * scenario.num_blocks
        self.registered: list[tuple[Prefix, int]] = []  # in order of registration
        self.tables: dict[str, list[int]] = {}
        self.placed: dict[str, int] = {}
        self.considered: dict[str, int] = {}
        self.outdated: set[str] = set()  # held blocks when everything was evicted: they register nothing more

    # -- the pool ----------------------------------------------------------------------------------------------------

    def prefix_of(self, block: int) -> Prefix | None:
        return next((prefix for prefix, owner in self.registered if owner == block), None)

    def find(self, prefix: Prefix) -> int | None:
        return next((block for known, block in self.registered if known == prefix), None)

    def unregister(self, block: int) -> None:
        self.registered = [(prefix, owner) for prefix, owner in self.registered if owner != block]

    def take(self) -> int:
        block = self.free_queue.pop(0)
        self.unregister(block)
        self.ref_cnt[block] = 1
        return block

    def release_blocks(self, blocks: Sequence[int]) -> None:
        counts = Counter(blocks)
        if any(not 0 < block < self.scenario.num_blocks or self.ref_cnt[block] < counts[block] for block in counts):
            raise RefusedError("a block is released more often than it is held, or is none")
        gone: list[int] = []
        for block in blocks:
            self.ref_cnt[block] -= 1
            if not self.ref_cnt[block]:
                gone.append(block)
        keyed = {owner for _, owner in self.registered}
        self.free_queue = [
            *[block for block in gone if block not in keyed],
            *self.free_queue,
            *[block for block in gone if block in keyed],
        ]

    # -- questions ---------------------------------------------------------------------------------------------------

    def match(self, request_id: str, tokens: Sequence[int]) -> FoundPrefix:
        blocks: list[int] = []
        for end in range(self.size, len(tokens), self.size) if self.scenario.enable_caching else ():
            block = self.find(tuple(tokens[:end]))
            if block is None:
                break
            blocks.append(block)
        if self.scenario.use_eagle:
            blocks = blocks[:-1]
        hit = len(blocks) * self.size
        return FoundPrefix(hit, (request_id, tuple(tokens[:hit]), blocks), (tuple(blocks),))

    def can_admit(self, request_id: str, tokens: Sequence[int], found: FoundPrefix | None, limits: Limits) -> bool:
        hits = found.handle[2] if found else []
        slots = min(len(tokens), self.scenario.max_model_len)
        watermark = self.scenario.watermark_blocks if limits.use_watermark else 0
        return self.missing(request_id, slots, hits) + watermark <= len(self.free_queue) - limits.reserved_blocks

    def missing(self, request_id: str, slots: int, hits: Sequence[int]) -> int:
        held = len(self.tables.get(request_id, ()))
        return max(-(-slots // self.size) - held - len(hits), 0) + sum([not self.ref_cnt[block] for block in hits])

    # -- commands ----------------------------------------------------------------------------------------------------

    def allocate(self, placement: Placement, found: FoundPrefix | None, limits: Limits) -> bool:
        name, hits = placement.request_id, []
        if found and found.num_hit_tokens:
            owner, prefix, hits = found.handle
            fresh = [self.prefix_of(block) == prefix[: (i + 1) * self.size] for i, block in enumerate(hits)]
            if name in self.tables or owner != name or not all(fresh):
                raise RefusedError("a match that is stale, of another request, or for one that holds blocks")
        if name not in self.tables and len(self.tables) == self.scenario.max_num_reqs:
            raise RefusedError("max_num_reqs requests hold blocks already")
        start = placement.start + len(hits) * self.size
        end = start + placement.num_external_tokens + placement.num_new_tokens
        slots = self.slots(end, limits)
        missing, copies = self.missing(name, slots, hits), self.copies(name, start, slots, Counter())
        watermark = self.scenario.watermark_blocks if limits.use_watermark else 0
        if missing + len(copies) > len(self.free_queue) - limits.reserved_blocks - watermark:
            if len(self.tables.get(name, ())) + missing > self.scenario.num_usable_blocks:
                raise NeverFitsError(f"{slots} slots")
            return False
        self.tables.setdefault(name, list(hits))
        for block in hits:
            if not self.ref_cnt[block]:
                self.free_queue.remove(block)
            self.ref_cnt[block] += 1
        self.considered.setdefault(name, len(hits))
        self.go_back(name, start)
        self.copy(name, copies)
        self.overwrite(name, start, slots)
        self.extend(name, slots)
        self.register(placement, end)
        return True

    def append(self, placements: Sequence[Placement], limits: Limits) -> bool:
        names = [placement.request_id for placement in placements]
        if len(set(names)) < len(names) or any(name not in self.tables for name in names):
            raise RefusedError("a request is named twice or holds nothing")
        slots = [self.slots(placement.start + placement.num_new_tokens, limits) for placement in placements]
        copied: Counter[int] = Counter()
        copies = [self.copies(p.request_id, p.start, end, copied) for p, end in zip(placements, slots, strict=True)]
        missing = [self.missing(name, end, ()) for name, end in zip(names, slots, strict=True)]
        if sum(missing) + sum([len(indices) for indices in copies]) > len(self.free_queue) - limits.reserved_blocks:
            return False
        for placement in placements:
            self.go_back(placement.request_id, placement.start)
        for placement, indices, end in zip(placements, copies, slots, strict=True):
            self.copy(placement.request_id, indices)
            self.overwrite(placement.request_id, placement.start, end)
        for name, end in zip(names, slots, strict=True):
            self.extend(name, end)
        for placement in placements:
            self.register(placement, placement.start + placement.num_new_tokens)
        return True

    def truncate(self, request_id: str, num_tokens: int) -> None:
        if num_tokens > self.placed.get(request_id, -1):
            raise RefusedError("it has fewer tokens")
        keep = -(-num_tokens // self.size)
        gone = self.tables[request_id][keep:]
        del self.tables[request_id][keep:]
        self.release_blocks(gone[::-1])
        if num_tokens < self.placed[request_id]:
            self.go_back(request_id, num_tokens)
        self.placed[request_id] = num_tokens

    def fork(self, parent_id: str, child_id: str, tokens: Sequence[int]) -> None:
        if parent_id not in self.tables or child_id in self.tables:
            raise RefusedError("the parent holds nothing, or the child something")
        if len(self.tables) == self.scenario.max_num_reqs:
            raise RefusedError("max_num_reqs requests hold blocks already")
        self.placed[child_id] = self.placed[parent_id]
        self.considered[child_id] = self.considered[parent_id]
        if parent_id in self.outdated:
            self.outdated.add(child_id)
        self.tables[child_id] = self.tables[parent_id][: -(-self.placed[parent_id] // self.size)]
        for block in self.tables[child_id]:
            self.ref_cnt[block] += 1

    def free(self, request_id: str) -> None:
        if request_id not in self.tables:
            raise RefusedError("it holds nothing")
        self.release_blocks(self.tables.pop(request_id)[::-1])
        del self.placed[request_id], self.considered[request_id]
        self.outdated.discard(request_id)

    preempt = free

    def abort(self, request_id: str) -> None:
        if request_id in self.tables:
            self.free(request_id)

    def evict(self, blocks: Sequence[int]) -> None:
        if any(not 0 <= block < self.scenario.num_blocks for block in blocks):
            raise RefusedError("no such block")
        before = len(self.registered)
        for block in blocks:
            self.unregister(block)
        if before and not self.registered:
            self.outdated.update(self.placed)

    def reset(self) -> None:
        if any(self.ref_cnt):
            raise RefusedError("blocks are in use")
        self.registered = []

    def view(self) -> AllocatorView:
        found: dict[tuple[int, Prefix], list[int]] = {}
        for prefix, block in self.registered:
            found.setdefault((0, prefix), []).append(block)
        return AllocatorView(
            num_blocks=self.scenario.num_blocks,
            tables={name: [list(table)] for name, table in self.tables.items()},
            free=self.free_queue,
            ref_cnt=self.ref_cnt,
            keyed={block: (0, prefix) for prefix, block in self.registered},
            found=found,
            num_placed=dict(self.placed),
            key_prefix=tuple,
        )

    # -- steps of commands -------------------------------------------------------------------------------------------

    def slots(self, end: int, limits: Limits) -> int:
        return min(end + limits.num_lookahead_tokens, self.scenario.max_model_len)

    def copies(self, name: str, start: int, slots: int, copied: Counter[int]) -> list[int]:
        """Indices of blocks that others read and the new tokens would overwrite; the last reader keeps its block."""
        indices: list[int] = []
        table = self.tables.get(name, [])
        for index in range(start // self.size, min(-(-slots // self.size), len(table))):
            if self.ref_cnt[table[index]] - copied[table[index]] > 1:
                copied[table[index]] += 1
                indices.append(index)
        return indices

    def copy(self, name: str, indices: Sequence[int]) -> None:
        for index in indices:
            self.ref_cnt[self.tables[name][index]] -= 1
            self.tables[name][index] = self.take()

    def overwrite(self, name: str, start: int, slots: int) -> None:
        for block in self.tables[name][start // self.size : -(-slots // self.size)]:
            self.unregister(block)

    def go_back(self, name: str, start: int) -> None:
        self.considered[name] = min(self.considered[name], start // self.size)

    def extend(self, name: str, slots: int) -> None:
        while len(self.tables[name]) * self.size < slots:
            self.tables[name].append(self.take())

    def register(self, placement: Placement, end: int) -> None:
        name = placement.request_id
        self.placed[name] = end
        complete = min(end, len(placement.tokens)) // self.size
        if not self.scenario.enable_caching or name in self.outdated:
            return
        if not placement.num_new_tokens:  # what is copied in later is not there yet
            return
        for index in range(self.considered[name], complete):
            block = self.tables[name][index]
            if self.prefix_of(block) is None:
                self.registered.append((tuple(placement.tokens[: (index + 1) * self.size]), block))
        self.considered[name] = max(self.considered[name], complete)


@supporting(
    Supports(
        options=[
            "eagle",
            "external",
            "async_loads",
            "lookahead",
            "drafts",
            "rollback",
            "reserved",
            "watermark",
            "deferred",  # the same as immediate for one group
            "no_caching",
            "ordered",
            "tail_first",
            "refuses_for_good",
        ],
        waived=["no_orphans"],  # like the recorded default, it keeps what an evict by id has cut off
    )
)
def make(scenario: Scenario) -> ListManager:
    return ListManager(scenario)

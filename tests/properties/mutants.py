"""Faults to be found: each changes one rule of the allocator by one line, in a copy of its sources."""

import importlib
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import attrs

CORE = Path(__file__).parents[2] / "core"


@attrs.frozen
class Mutant:
    """One wrong line.

    Attributes:
        name: the fault in words; names the test.
        file: where, in core/.
        line: the text that is replaced; must be there exactly once.
        wrong: what it is replaced by.
        field_reports: ids of the reports whose tests fail on it, too.
    """

    name: str
    file: str
    line: str
    wrong: str
    field_reports: tuple[str, ...] = ()

    def copy_to(self, folder: Path) -> ModuleType:
        """Copy core/ with the fault in it below `folder` and import it as a package of its own."""
        package = "mutant_" + re.sub(r"\W+", "_", self.name)
        target = folder / package
        shutil.copytree(CORE, target, ignore=shutil.ignore_patterns("__pycache__"))
        (target / "__init__.py").write_text(_EXPORTS)
        path = target / self.file
        source = path.read_text()
        if source.count(self.line) != 1:
            raise LookupError(
                f"mutant {self.name!r}: core/{self.file} has {source.count(self.line)} places that read "
                f"{self.line!r}; name the line as it reads now, or drop the mutant if the rule is gone"
            )
        path.write_text(source.replace(self.line, self.wrong))
        sys.path.insert(0, str(folder))
        try:
            return importlib.import_module(package)
        finally:
            sys.path.remove(str(folder))
            for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
                del sys.modules[name]


# What the adapter needs, without the rest of the package, whose import takes longer than finding a fault.
_EXPORTS = """
from .allocator import KVCacheAllocator
from .allocator_config import AllocatorConfig
from .cache_kinds import ChunkedLocal, CompressedState, FullAttention, SequenceState, SlidingWindow
from .errors import DoesNotFitError, InputError, MisuseError
from .event_log import EventLog
from .types import Request
"""

MUTANTS = (
    # Block pool and free queue
    Mutant(
        "freed content is reused first",
        "block_pool.py",
        "self.free_queue.append(keyed)",
        "self.free_queue.prepend(keyed)",
        ("B09", "C04"),
    ),
    Mutant(
        "empty blocks are reused last",
        "block_pool.py",
        "self.free_queue.prepend(unkeyed)",
        "self.free_queue.append(unkeyed)",
    ),
    Mutant(
        "empty blocks are queued in reverse",
        "block_pool.py",
        "self.free_queue.prepend(unkeyed)",
        "self.free_queue.prepend(unkeyed[::-1])",
    ),
    Mutant(
        "a key is dropped when its block is freed",
        "block_pool.py",
        "(unkeyed if key_of[block] is None else keyed).append(block)",
        "(self.uncache([block]), unkeyed)[1].append(block)",
        ("B01", "B02", "B03", "B07", "B08", "B09", "C04"),
    ),
    Mutant(
        "a taken block keeps its key",
        "block_pool.py",
        "keyed = [block for block in blocks if key_of[block] is not None]\n        if not keyed:",
        "keyed = [block for block in blocks if key_of[block] is not None]\n        if True:",
        ("B07", "B08"),
    ),
    Mutant(
        "a double free is accepted",
        "block_pool.py",
        "            if left == 0:",
        "            if left <= 0:",
        ("C01",),
    ),
    Mutant(
        "the newest duplicate is found",
        "block_pool.py",
        "self._duplicates[group].setdefault(key, []).append(block)",
        "self._duplicates[group].setdefault(key, []).insert(0, index.pop(key)); index[key] = block",
    ),
    Mutant(
        "of several duplicates the newest takes over",
        "block_pool.py",
        "index[key] = others.pop(0)",
        "index[key] = others.pop()",
    ),
    Mutant(
        "an adopted block stays in the free queue",
        "block_pool.py",
        "            self.free_queue.remove(queued)",
        "            pass",
    ),
    Mutant(
        "adopting a block in use does not count",
        "block_pool.py",
        "        for block in live:\n            ref_cnt[block] += 1",
        "        for block in live:\n            ref_cnt[block] = 1",
        ("C02", "C06"),
    ),
    Mutant(
        "the index keeps a key that its block has lost",
        "block_pool.py",
        "            del index[key]\n            return",
        "            return",
        ("B07",),
    ),
    Mutant(
        "a reset leaves the index",
        "block_pool.py",
        "            index.clear()",
        "            pass",
        ("B10",),
    ),
    Mutant(
        "a removed block leaves no hole in the queue",
        "free_queue.py",
        "            ring[position_of[block]] = 0",
        "            pass",
    ),
    # Lookup
    Mutant(
        "a whole prompt may hit",
        "prefix_match.py",
        "        max_length = request.num_tokens - 1",
        "        max_length = request.num_tokens",
        ("B01", "B03"),
    ),
    Mutant(
        "a stale match is trusted",
        "prefix_match.py",
        "if block and (pool.key_of(block) != key or pool.group_of(block) != group):",
        "if False:",
    ),
    Mutant(
        "a group looks beyond what the others found",
        "prefix_match.py",
        "hits = kind.find_hit(keys[: room // block_size], indexes",
        "hits = kind.find_hit(keys, indexes",
    ),
    Mutant(
        "EAGLE keeps the last block of a hit",
        "cache_kinds.py",
        "        length = min([len(run) for run in found])\n        if drop_last and length:",
        "        length = min([len(run) for run in found])\n        if False:",
    ),
    Mutant(
        "a hit needs one block of its window too few",
        "cache_kinds.py",
        "return -(-(self.window - 1) // self.block_size) + drop_last",
        "return (self.window - 1) // self.block_size + drop_last",
    ),
    Mutant(
        "a hit may end inside a chunk that was not looked up",
        "cache_kinds.py",
        " or not self._holds_its_chunk(length, start)",
        "",
    ),
    # Windows
    Mutant(
        "a window is released one token early",
        "cache_kinds.py",
        "return max(0, num_computed_tokens - self.window + 1)",
        "return max(0, num_computed_tokens - self.window + 2)",
    ),
    Mutant(
        "a window is released one token late",
        "cache_kinds.py",
        "return max(0, num_computed_tokens - self.window + 1)",
        "return max(0, num_computed_tokens - self.window)",
    ),
    Mutant(
        "a chunk is released before it is over",
        "cache_kinds.py",
        "return num_computed_tokens // self.chunk_size * self.chunk_size\n",
        "return -(-num_computed_tokens // self.chunk_size) * self.chunk_size\n",
    ),
    Mutant(
        "the latest state is released",
        "cache_kinds.py",
        "return max(0, num_computed_tokens - 1)",
        "return num_computed_tokens",
    ),
    # Admission
    Mutant(
        "the watermark is ignored",
        "allocator.py",
        "spare = len(state.pool.free_queue) - reserved_blocks - (self.config.watermark_blocks if use_watermark else 0)",
        "spare = len(state.pool.free_queue) - reserved_blocks",
    ),
    Mutant(
        "reserved blocks are taken by an allocation",
        "allocator.py",
        "spare = len(state.pool.free_queue) - reserved_blocks - (self.config.watermark_blocks if use_watermark else 0)",
        "spare = len(state.pool.free_queue) - (self.config.watermark_blocks if use_watermark else 0)",
    ),
    Mutant(
        "reserved blocks are taken by a decode step",
        "allocator.py",
        "if total_short > len(state.pool.free_queue) - reserved_blocks:",
        "if total_short > len(state.pool.free_queue):",
    ),
    Mutant(
        "the gate forgets the watermark",
        "allocator.py",
        "spare = self.num_free_blocks - reserved_blocks - (self.config.watermark_blocks if use_watermark else 0)",
        "spare = self.num_free_blocks - reserved_blocks",
    ),
    Mutant(
        "cached blocks count as free and as hit",
        "admission.py",
        "max(wanted - max(skipped, len(hits[group]) + held), 0) + adopted_free",
        "max(wanted - max(skipped, len(hits[group]) + held), 0)",
        ("B09",),
    ),
    Mutant(
        "an exact fit is refused",
        "allocator.py",
        "if sum(needs) + copies > spare:",
        "if sum(needs) + copies >= spare:",
        ("B07", "B08", "B09", "C03", "C04"),
    ),
    Mutant(
        "what never fits waits for ever",
        "allocator.py",
        "            self._admission.check_can_ever_hold(request, row, sum(needs))\n",
        "",
        ("B09", "C03"),
    ),
    Mutant(
        "a reset drops keys while blocks are in use",
        "allocator.py",
        "        held = self.state.pool.num_held_blocks\n        if held:",
        "        held = self.state.pool.num_held_blocks\n        if False:",
        ("B10",),
    ),
    # Slots and tables
    Mutant(
        "lookahead is ignored",
        "allocator.py",
        "num_slots = min(end + num_lookahead_tokens, self.config.max_model_len)\n        guarded",
        "num_slots = end\n        guarded",
        ("D06",),
    ),
    Mutant(
        "a full last block brings another",
        "allocator.py",
        "count = _ceil_div(num_slots, table.block_size) - table.count(row)",
        "count = num_slots // table.block_size + 1 - table.count(row)",
        ("B07", "B08", "B09", "C03", "C04", "C05", "D06"),
    ),
    Mutant(
        "a decode step that fills a block finds it missing",
        "block_table.py",
        "which = (short > 0).nonzero()[0]\n        return which, -(-short[which] // self.block_size)",
        "which = (short >= 0).nonzero()[0]\n        return which, short[which] // self.block_size + 1",
        ("C05", "D06"),
    ),
    Mutant(
        "truncation drops the block that is kept in part",
        "allocator.py",
        "keep = _ceil_div(num_tokens, table.block_size)",
        "keep = num_tokens // table.block_size",
    ),
    Mutant(
        "a request is freed head first",
        "allocator.py",
        "segments.append((group, tuple(table.blocks(row, start)[::-1])))",
        "segments.append((group, tuple(table.blocks(row, start))))",
        ("B07", "C02"),
    ),
    Mutant(
        "a request keeps its first block when it ends",
        "allocator.py",
        "segments.append((group, tuple(table.blocks(row, start)[::-1])))",
        "segments.append((group, tuple(table.blocks(row, start + 1)[::-1])))",
        ("B08", "B09", "B10", "C02", "C04", "C06"),
    ),
    # Copy on write
    Mutant(
        "a fork writes without a copy",
        "copy_on_write.py",
        "if pool.ref_cnt(block) - copied[block] > 1:",
        "if pool.ref_cnt(block) - copied[block] > 99:",
    ),
    Mutant(
        "the last reader copies too",
        "copy_on_write.py",
        "if pool.ref_cnt(block) - copied[block] > 1:",
        "if pool.ref_cnt(block) > 1:",
    ),
    Mutant(
        "an overwritten block stays findable",
        "copy_on_write.py",
        "elif pool.key_of(block) is not None:",
        "elif False:",
    ),
    Mutant(
        "the first write after going back ends the guard",
        "ledger_state.py",
        "            if held > 1:\n                return False",
        "            if held > 1:\n                return True",
    ),
    # Registration
    Mutant(
        "the last complete block is not registered",
        "registration.py",
        "return known_tokens // self._config.scheduler_block_size * self._config.scheduler_block_size",
        "return (known_tokens - 1) // self._config.scheduler_block_size * self._config.scheduler_block_size",
        ("B01", "B08", "B09", "C04"),
    ),
    Mutant(
        "what others share is registered again",
        "registration.py",
        "return block in seen or self._state.pool.key_of(block) is not None",
        "return False",
    ),
    Mutant(
        "a block is registered behind an evicted one although orphans are dropped",
        "registration.py",
        'self._config.orphans == "drop"',
        'self._config.orphans == "drop it"',
    ),
    Mutant(
        "only the next orphan is dropped",
        "orphans.py",
        "                        gone.append(key)",
        "                        pass",
    ),
)

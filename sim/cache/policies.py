"""Replays prompts through a bare prefix cache: one capacity, one eviction policy, no allocator.

Requests are served one after the other. A prompt hits the longest prefix of its blocks that is cached, takes new blocks
for the rest, and gives all of them back, the last one first; while it is served, its blocks are never evicted. A prompt
of more blocks than the cache holds keeps its first ones. A block that is cached but cannot be found, because a block
before it was evicted, is computed again, and both copies stay until they are evicted. These are the rules of vLLM's
pool, so every policy finds the same hits here as in the ledger, 3 to 5 times as fast.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence

from ...core.errors import InputError
from ...core.pool.policies.belady import Belady
from ...core.pool.policies.policy import EvictionPolicy, eviction_policies
from .lru_curve import CachePoint
from .optimum import optimum_hits
from .prompt_blocks import NEVER, PromptBlocks

# Policies that need the future, so that no server can run them.
BELADY, OPTIMUM = "belady", "optimum"


def policy_names() -> tuple[str, ...]:
    """Every policy that can be replayed: the registered ones, Belady's, and the optimum that may refuse a block."""
    return (*eviction_policies.names(), BELADY, OPTIMUM)


def check_policies(policies: Sequence[str]) -> None:
    """Raise `InputError` if there is no policy, or one that is not known."""
    unknown = [name for name in policies if name not in (BELADY, OPTIMUM) and name not in eviction_policies]
    if unknown or not policies:
        raise InputError(f"--policy {', '.join(unknown) or 'is empty'}: the policies are {', '.join(policy_names())}")


def replay_policy(prompts: PromptBlocks, policy: str, num_blocks: int) -> CachePoint:
    """Hits of one policy with `num_blocks` usable blocks. Raises `InputError` for an unknown policy or no blocks."""
    check_policies([policy])
    if num_blocks < 1:
        raise InputError(f"--capacities holds {num_blocks}; a cache has 1 block or more")
    if prompts.split > 1:
        raise InputError(
            f"--policy {policy} is replayed block by block, at the trace's own --block-size "
            f"({prompts.block_size * prompts.split}) or a multiple; at {prompts.block_size} only lru is available"
        )
    block_size = prompts.block_size
    hit_blocks = hit_tokens = full_block_hits = 0
    for hits, input_length in zip(_hits(prompts, policy, num_blocks), prompts.input_lengths.tolist(), strict=True):
        if hits:
            hit_blocks += hits
            hit_tokens += min(hits * block_size, input_length)
            full_block_hits += min(hits, (input_length - 1) // block_size)
    return CachePoint(num_blocks, hit_blocks, hit_tokens, full_block_hits * block_size)


def _hits(prompts: PromptBlocks, policy: str, num_blocks: int) -> Iterator[int]:
    if policy == OPTIMUM:
        return optimum_hits(prompts, num_blocks)
    if policy == BELADY:
        future = _NextEvents(prompts)
        return cached_prefixes(future, prompts.num_distinct, Belady(num_blocks + 1, future.next_use), num_blocks)
    return cached_prefixes(prompts, prompts.num_distinct, eviction_policies.get(policy)(num_blocks + 1), num_blocks)


def cached_prefixes(
    prompts: Iterable[list[int]], num_keys: int, policy: EvictionPolicy, num_blocks: int
) -> Iterator[int]:
    """Serve prompts of block keys `0 .. num_keys - 1` from `num_blocks` blocks; yield how many blocks each one hits."""
    no_key = num_keys
    block_of = [0] * (num_keys + 1)  # the block that a lookup finds; 0: none
    key_of = [no_key] * (num_blocks + 1)
    copies: dict[int, list[int]] = {}  # further blocks of a key, the oldest first
    unused = list(range(num_blocks, 0, -1))
    is_held = policy.is_held
    looks_at_releases = type(policy).release is not EvictionPolicy.release
    find = block_of.__getitem__
    for keys in prompts:
        found = list(map(find, keys))
        num_hits = found.index(0) if 0 in found else len(found)
        blocks = found[:num_hits]
        if blocks:
            for block in blocks:
                is_held[block] = 1
            policy.hold(blocks)
            policy.use(blocks)
        new_keys = keys[num_hits:num_blocks]
        new: list[int] = []
        if new_keys:
            new, victims = unused[-len(new_keys) :], new
            del unused[-len(new_keys) :]
            if len(new) < len(new_keys):
                victims = policy.victims(len(new_keys) - len(new))
                policy.evict(victims)
                new += victims
            if copies:
                _drop_keys(victims, key_of, block_of, copies)
            else:
                for block in victims:
                    block_of[key_of[block]] = 0
            if len(found) - found.count(0) > num_hits:
                _add_keys(new, new_keys, key_of, block_of, copies)
            else:
                for block, key in zip(new, new_keys, strict=True):
                    key_of[block] = key
                    block_of[key] = block
            policy.admit(0, new, range(num_hits, num_hits + len(new)), new_keys)
        for block in blocks:
            is_held[block] = 0
        if looks_at_releases:
            blocks += new
            blocks.reverse()
            policy.release(blocks)
        yield num_hits


def _add_keys(
    blocks: list[int], keys: list[int], key_of: list[int], block_of: list[int], copies: dict[int, list[int]]
) -> None:
    """Give new blocks their keys, some of which older blocks have, which a lookup goes on to find."""
    for block, key in zip(blocks, keys, strict=True):
        key_of[block] = key
        if block_of[key]:
            copies.setdefault(key, []).append(block)
        else:
            block_of[key] = block


def _drop_keys(blocks: list[int], key_of: list[int], block_of: list[int], copies: dict[int, list[int]]) -> None:
    """Take the keys of evicted blocks away. Where a key has copies, a lookup finds the oldest that is left."""
    for block in blocks:
        key = key_of[block]
        others = copies.get(key)
        if others is None:
            block_of[key] = 0
            continue
        if block_of[key] == block:
            block_of[key] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del copies[key]


class _NextEvents:
    """The prompts, and the future of the one being served: its block events ask for their next ones in order."""

    def __init__(self, prompts: PromptBlocks) -> None:
        self._prompts = prompts
        self._event = 0
        self._next_event = [math.inf if event == NEVER else event for event in prompts.next_event.tolist()]

    def __iter__(self) -> Iterator[list[int]]:
        end = 0
        for blocks in self._prompts:
            self._event, end = end, end + len(blocks)
            yield blocks

    def next_use(self, key: Hashable) -> float:
        """The next event of the block at hand. Every block of a prompt asks once, except those left out at its end."""
        event = self._event
        self._event = event + 1
        return self._next_event[event]

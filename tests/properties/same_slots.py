"""Follows a log with SimBackend and with real memory in many layouts, and demands that they agree byte for byte.

Three paths compute each slot: the kit's oracle from the allocator's tables, SimBackend's NumPy, and CudaBackend's
device tables through the kernel, read back from the device. Tokens are written as they are placed, each one's marker
(`slot_markers.py`) to its slot. Beside each real buffer a NumPy shadow is written at the oracle's slots, and all bytes
of both must be equal after every step.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from kvledger.backends import SimBackend
from kvledger.backends.context_rank import ContextRank
from kvledger.backends.cuda.backend import CudaBackend
from kvledger.backends.cuda.layer_access import KVScales
from kvledger.backends.cuda.layout import CacheArrangement, torch_dtype
from kvledger.core import Commit, TokenBatch
from kvledger.core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksFreed,
    BlocksShared,
    BlocksUncached,
    FreeReason,
    PoolCreated,
    PrefixAdopted,
    TokensPlaced,
    as_ints,
)
from kvledger.core.ledger.state import LedgerState
from kvledger.core.planner.layout import KVCacheConfig, KVCacheGroup, KVCacheLayout, lay_out, needs_zeroing
from kvledger.core.planner.specs import (
    CompressedStateSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaLikeSpec,
    MLASpec,
    StateArray,
)
from kvledger.testing.scenario import GroupShape
from kvledger.testing.shadow_cache import ShadowCache
from kvledger.testing.slot_oracle import slot_of
from numpy.typing import NDArray

from tests.properties.slot_markers import MODEL_DTYPE, MarkedPart, MarkedTokens

# Of a key or a value, in the group whose blocks are the size that all groups' sizes divide: a vector of a classic key
# cache.
_BYTES_PER_TOKEN = 16
_MAX_BATCHED_TOKENS = 2_048


class SlotMismatchError(AssertionError):
    """The simulation and the memory disagree."""


@attrs.frozen
class Variant:
    """One way to lay out memory.

    Attributes:
        layout: the plan's.
        arrangement: of keys and values.
        is_latent: groups of attention keep one latent a token; compressed and state groups are what they are.
        splits: kernel blocks that a block is split into, where its size allows.
        dtype: of keys, values and latents; one of 8 bits is written and read with scales.
    """

    layout: KVCacheLayout
    arrangement: CacheArrangement = CacheArrangement.PACKED
    is_latent: bool = False
    splits: int = 1
    dtype: str = "bf16"

    def __str__(self) -> str:
        kind = "latent" if self.is_latent else self.arrangement.value
        return f"{self.dtype} {kind} {self.layout.name}" + (f" in {self.splits}" if self.splits > 1 else "")


VARIANTS = (
    *[Variant(layout) for layout in KVCacheLayout],
    Variant(KVCacheLayout.LBNHC, CacheArrangement.FLASH_NHD),
    Variant(KVCacheLayout.LBHNC, CacheArrangement.FLASH_HND),
    Variant(KVCacheLayout.LBNHC, CacheArrangement.INTERLEAVED_NHD),
    Variant(KVCacheLayout.BLHNC, CacheArrangement.INTERLEAVED_HND),
    Variant(KVCacheLayout.LBNHC, CacheArrangement.CLASSIC),
    Variant(KVCacheLayout.BLNHC, is_latent=True),
    Variant(KVCacheLayout.BLHNC, splits=2),
    Variant(KVCacheLayout.LBHNC, CacheArrangement.FLASH_HND, splits=2),
)

FP8_VARIANTS = tuple(attrs.evolve(variant, dtype=dtype) for dtype in ("fp8_e4m3", "fp8_e5m2") for variant in VARIANTS)

MakeBackend = Callable[..., CudaBackend]


def plan_for(groups: Sequence[GroupShape], num_blocks: int, variant: Variant, ranks: int = 1) -> KVCacheConfig:
    """A small plan whose groups all have pages of one size: two layers in the first group, one in each other."""
    unit = math.lcm(*[group.block_size for group in groups])
    made: list[KVCacheGroup] = []
    heads = [2 if unit // group.block_size % 2 == 0 else 1 for group in groups]
    if variant.layout is KVCacheLayout.LHBNC:
        heads = [min(heads)] * len(groups)  # heads outside blocks: all groups must cut their pages alike
    for number, group in enumerate(groups):
        spec = _spec(group, unit, heads[number], variant, ranks)
        names = tuple([f"group{number}.layer{layer}" for layer in range(1 if number else 2)])
        made.append(KVCacheGroup(names, (spec,) * len(names), spec))
    return lay_out(made, num_blocks, variant.layout)


def _spec(group: GroupShape, unit: int, heads: int, variant: Variant, ranks: int) -> KVCacheSpec:
    dtype = variant.dtype
    token_bytes = unit // group.block_size * _BYTES_PER_TOKEN
    per_token = token_bytes // torch_dtype(dtype).itemsize
    if variant.is_latent:
        if group.kind == "state":
            return MambaLikeSpec(block_size=group.block_size, states=(StateArray((unit * 8,), "bf16"),))
        if group.kind == "compressed":
            states = {"tokens_per_state": group.span, "head_size": per_token * group.span}
            return CompressedStateSpec(block_size=group.block_size, dtype=dtype, **states)
        return MLASpec(block_size=group.block_size // ranks, head_size=per_token * ranks, dtype=dtype)
    return FullAttentionSpec(
        block_size=group.block_size // ranks,
        num_kv_heads=heads * ranks,
        head_size=per_token // heads,
        dtype=dtype,
    )


def scales_of(config: KVCacheConfig, variant: Variant) -> dict[str, KVScales]:
    """Scales of the 8-bit layers, no two alike: what is stored with another one than its own is another byte."""
    if variant.dtype == "bf16":
        return {}
    names = [name for group in config.groups if not isinstance(group.spec, MambaLikeSpec) for name in group.layer_names]
    return {
        name: KVScales(k_scale=0.37 * 2.0**number, v_scale=0.0021 * 2.0**-number) for number, name in enumerate(names)
    }


class Memory:
    """One CudaBackend and its shadow."""

    def __init__(self, variant: Variant, backend: CudaBackend, config: KVCacheConfig, noise: NDArray[np.uint8]) -> None:
        self.variant, self.backend, self.config = variant, backend, config
        backend.initialize(config)
        self._scales = scales_of(config, variant)
        self.shadow = self._arrays(noise.copy())
        backend.raw.copy_(torch.from_numpy(noise.view(np.int8)))

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The real buffer, read back."""
        return self.backend.raw.cpu().numpy().view(np.uint8)

    def move(self, event: BlockCopied | BlocksAllocated) -> None:
        """What an event does to the shadow's bytes: where taken blocks are cleared, they become like the null block."""
        if isinstance(event, BlockCopied):
            self.shadow.copy_block(event.group, event.source, event.target)
        elif needs_zeroing(self.config.groups):
            for block in as_ints(event.blocks):
                self.shadow.copy_block(event.group, 0, block)

    def as_arrays(self) -> ShadowCache:
        """The real buffer, read back and taken apart by reshaping."""
        return self._arrays(self.bytes)

    def _arrays(self, buffer: NDArray[np.uint8]) -> ShadowCache:
        element = np.uint16 if self.variant.dtype == "bf16" else np.uint8
        return ShadowCache(self.config, self.variant.arrangement.value, self.variant.splits, element, buffer=buffer)

    def writes(self, group: int) -> list[str]:
        """Layers of a group that keys and values are written to through a kernel."""
        spec = self.config.groups[group].spec
        return list(self.config.groups[group].layer_names) if isinstance(spec, FullAttentionSpec | MLASpec) else []

    def parts_of(self, layer: str) -> list[MarkedPart]:
        """What this layer stores of a token: keys and values, or a latent."""
        spec, scales = self.backend.layers[layer].spec, self._scales.get(layer, KVScales(1.0, 1.0))
        if isinstance(spec, FullAttentionSpec):
            shape, dtype = (spec.num_kv_heads, spec.head_size), self.variant.dtype
            return [
                MarkedPart(layer, i, shape, dtype, s or 1.0) for i, s in enumerate((scales.k_scale, scales.v_scale))
            ]
        assert isinstance(spec, MLASpec)
        return [MarkedPart(layer, 0, (spec.head_size,), self.variant.dtype, scales.k_scale or 1.0)]

    def write(self, group: int, tokens: MarkedTokens, slots: NDArray[np.int64], num_padding: int) -> None:
        """Markers into the real memory through the kernel, and into the shadow at these slots."""
        for layer in self.writes(group):
            parts = self.parts_of(layer)
            self.shadow.write(layer, slots, tuple([tokens.markers(part) for part in parts]))
            numbers = [tokens.numbers(part, num_padding, self.backend.device) for part in parts]
            if len(numbers) == 1:
                cut = numbers[0].shape[1] // 2
                numbers = [numbers[0][:, :cut], numbers[0][:, cut:]]
            self.backend.write_kv(layer, *numbers)


class SameSlots:
    """SimBackend and several CudaBackends on one log.

    Attributes:
        seen: what has happened so far, by name.
        num_tokens: tokens written so far, and `num_read` read back, in each memory.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape],
        created: PoolCreated,
        variants: Sequence[Variant] = VARIANTS,
        make_backend: MakeBackend = CudaBackend,
        context: ContextRank | None = None,
        device: str = "cpu",
    ) -> None:
        self.groups = groups
        self.context = ContextRank() if context is None else context
        self.sim = SimBackend(context=context)
        self.seen: Counter[str] = Counter()
        self.num_tokens = self.num_read = 0
        self._moves: list[BlockCopied | BlocksAllocated] = []
        self.memories: list[Memory] = []
        noise: dict[int, NDArray[np.uint8]] = {}
        for variant in variants:
            splits = variant.splits
            if any(group.block_size % (splits * self.context.size) for group in groups):
                splits = 1
            used = attrs.evolve(variant, splits=splits)
            config = plan_for(groups, created.num_blocks, used, self.context.size)
            backend = make_backend(
                device=device,
                max_num_batched_tokens=_MAX_BATCHED_TOKENS,
                arrangement=variant.arrangement,
                kernel_block_sizes=[group.spec.block_size // splits for group in config.groups],
                model_dtype=MODEL_DTYPE,
                kv_scales=scales_of(config, used),
                context=context,
            )
            if config.size_bytes not in noise:
                noise[config.size_bytes] = np.random.default_rng(0).integers(0, 256, config.size_bytes, dtype=np.uint8)
            self.memories.append(Memory(used, backend, config, noise[config.size_bytes]))

    # -- following a log ---------------------------------------------------------------------------------------------

    def apply(self, commit: Commit) -> None:
        """Give every backend the commit."""
        self.sim.apply(commit)
        for memory in self.memories:
            memory.backend.apply(commit)
        for event in commit.events:
            self._count(event)
            if isinstance(event, BlockCopied | BlocksAllocated):
                self._moves.append(event)

    def step(self, batch: TokenBatch, contents: NDArray[np.int64], state: LedgerState, writes: bool = True) -> None:
        """The commits so far make up a step with this batch: compare all tables and slots, write, compare all bytes.

        Args:
            batch: the tokens.
            contents: int64 `[num_tokens]`, a number for what each token and all before it are.
            state: the allocator's.
            writes: False for tokens that have slots but are not computed in this step (the child of a fork).

        Raises:
            SlotMismatchError: says where they differ.
        """
        num_padded = batch.num_tokens + batch.num_tokens % 3
        slots = [self._slots(batch, group, num_padded, state) for group in range(len(self.groups))]
        tokens = MarkedTokens(contents)
        for memory in self.memories:
            self._compare_tables(memory, batch, slots, num_padded)
            for event in self._moves:
                memory.move(event)
            if writes and batch.num_tokens:
                self._write(memory, tokens, slots, num_padded)
            self._compare_bytes(memory)
        self._moves = []
        self.num_tokens += batch.num_tokens if writes else 0

    def read_back(self, rows: Sequence[int], contents: Sequence[NDArray[np.int64]]) -> None:
        """Every position of these rows that still has a block holds its own marker, where the simulation says.

        Raises:
            SlotMismatchError: says which one does not.
        """
        lengths = np.array([len(content) for content in contents], dtype=np.int64)
        batch = TokenBatch(np.array(rows, dtype=np.int64), np.zeros(len(rows), dtype=np.int64), lengths)
        if not batch.num_tokens:
            return
        tokens = MarkedTokens(np.concatenate(contents))
        for group, shape in enumerate(self.groups):
            table = self.sim.block_tables[group]
            slots = self.sim.slot_mapping(batch, group)
            row_of_token = np.repeat(batch.rows, batch.counts)
            is_held = (table[row_of_token, batch.positions() // shape.block_size] != 0) & (slots >= 0)
            self.num_read += int(is_held.sum())
            for memory in self.memories:
                self._compare_markers(memory, group, batch, tokens, slots, is_held)

    # -- comparisons -------------------------------------------------------------------------------------------------

    def _slots(self, batch: TokenBatch, group: int, num_padded: int, state: LedgerState) -> NDArray[np.int64]:
        """Slots by the oracle; the simulation's must be the same."""
        size, context = self.groups[group].block_size, self.context
        ranks = context.size if self.groups[group].kind != "state" else 1
        rank = context.rank if ranks > 1 else 0
        tables = {row: state.tables[group].blocks(row) for row in set(batch.rows.tolist())}
        row_of_token: list[int] = np.repeat(batch.rows, batch.counts).tolist()
        expected = [
            slot_of(tables[row], size, position, rank, ranks, context.interleave_tokens)
            for row, position in zip(row_of_token, batch.positions().tolist(), strict=True)
        ]
        expected += [-1] * (num_padded - len(expected))
        simulated = self.sim.slot_mapping(batch, group, num_padded)
        if simulated.tolist() != expected:
            raise SlotMismatchError(f"group {group}: SimBackend says {simulated.tolist()}, the oracle {expected}")
        return simulated

    def _compare_tables(
        self, memory: Memory, batch: TokenBatch, slots: Sequence[NDArray[np.int64]], num_padded: int
    ) -> None:
        for group, expected in enumerate(slots):
            found = memory.backend.slot_mapping(batch, group, num_padded).cpu().numpy()
            if not np.array_equal(found, expected):
                raise SlotMismatchError(
                    f"{memory.variant}, group {group}: slots on the device are {found.tolist()}, simulated ones "
                    f"{expected.tolist()}"
                )
            simulated, device = self.sim.block_tables[group], memory.backend.block_tables[group].cpu().numpy()
            width = simulated.shape[1]
            if not np.array_equal(device[:, :width], simulated) or device[:, width:].any():
                where = np.argwhere(device[:, :width] != simulated)[:4].tolist()
                raise SlotMismatchError(f"{memory.variant}, group {group}: block tables differ at {where}")
            if not np.array_equal(memory.backend.num_blocks_per_row[group], self.sim.num_blocks_per_row[group]):
                raise SlotMismatchError(f"{memory.variant}, group {group}: num_blocks_per_row differs")

    def _write(self, memory: Memory, tokens: MarkedTokens, slots: Sequence[NDArray[np.int64]], num_padded: int) -> None:
        num_tokens = len(tokens.contents)
        for group, group_slots in enumerate(slots):
            # Tokens whose content comes from elsewhere are not kept where no later token attends to them: their place
            # is in the null block, which nobody writes.
            is_null = group_slots // (self.groups[group].block_size // self.context.size) == 0
            if is_null.any():
                on_device = memory.backend.slots[group, : len(is_null)]
                on_device[torch.from_numpy(is_null).to(on_device.device)] = -1
            kept = np.where(is_null, -1, group_slots)
            memory.write(group, tokens, kept[:num_tokens], num_padded - num_tokens)

    def _compare_bytes(self, memory: Memory) -> None:
        found, expected = memory.bytes, memory.shadow.buffer
        if found.tobytes() != expected.tobytes():
            where = np.flatnonzero(found != expected)
            per_block = memory.config.size_bytes // memory.config.num_blocks
            raise SlotMismatchError(
                f"{memory.variant}: {len(where)} bytes differ, the first at {where[0]} of {len(found)} ({per_block} a "
                "block)"
            )

    def _compare_markers(
        self,
        memory: Memory,
        group: int,
        batch: TokenBatch,
        tokens: MarkedTokens,
        slots: NDArray[np.int64],
        is_held: NDArray[np.bool_],
    ) -> None:
        real = memory.as_arrays()
        for layer in memory.writes(group):
            parts = memory.parts_of(layer)
            stored = zip(real.read(layer, slots[is_held]), [tokens.markers(part) for part in parts], strict=True)
            pairs = [(found, marker.reshape(len(slots), -1)[is_held]) for found, marker in stored]
            if self.context.size == 1:
                gathered = memory.backend.gather(layer, batch.rows.tolist(), batch.counts.tolist())
                numbers = [tokens.numbers(part, 0, memory.backend.device) for part in parts]
                for read, computed in zip(gathered, numbers, strict=True):
                    bits = [both.view(torch.int16).cpu().numpy().reshape(len(slots), -1) for both in (read, computed)]
                    pairs.append((bits[0][is_held], bits[1][is_held]))
            if not all(np.array_equal(found, expected) for found, expected in pairs):
                raise SlotMismatchError(
                    f"{memory.variant}: rows {batch.rows.tolist()} read other markers than their own in {layer}"
                )

    # -- what was seen -----------------------------------------------------------------------------------------------

    def _count(self, event: object) -> None:
        match event:
            case PrefixAdopted():
                self.seen["shared prefix"] += 1
            case BlocksShared():
                self.seen["fork"] += 1
            case BlockCopied():
                self.seen["copy on write"] += 1
            case BlocksAllocated(lost_keys=lost) if any(key is not None for key in lost):
                self.seen["eviction"] += 1
            case BlocksUncached():
                self.seen["key dropped"] += 1
            case BlocksFreed(reason=FreeReason.PREEMPTED):
                self.seen["preemption"] += 1
            case BlocksFreed(reason=FreeReason.TRUNCATED):
                self.seen["truncation"] += 1
            case BlocksFreed(reason=FreeReason.OUT_OF_WINDOW):
                self.seen["out of window"] += 1
            case _:
                pass


def batch_of(events: Sequence[TokensPlaced]) -> TokenBatch:
    """The tokens that these events placed, in their order."""
    columns = [
        [n for event in events for n in as_ints(column(event))]
        for column in (lambda e: e.rows, lambda e: e.first_positions, lambda e: e.counts)
    ]
    return TokenBatch(*[np.array(column, dtype=np.int64) for column in columns])

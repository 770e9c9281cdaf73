"""What the GPU benches run: one cache and one set of sources a layer, in an 8B model's geometry (8 x 128, bf16)."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import triton
from kvledger.kernels import SlotTables

NUM_LAYERS = 32
NUM_KV_HEADS = 8
HEAD_SIZE = 128
BLOCK_SIZE = 16
ITEM_BYTES = 2
DEVICE = "cuda:0"


def row_bytes(num_tokens: int) -> int:
    """Keys and values of that many tokens in one layer."""
    return 2 * num_tokens * NUM_KV_HEADS * HEAD_SIZE * ITEM_BYTES


@attrs.frozen(eq=False)
class Layer:
    """A layer's own memory.

    Attributes:
        rows: its keys and values, bf16 `[2, num_tokens, num_kv_heads, head_size]`.
        key_cache, value_cache: logical `[num_blocks, block_size, num_kv_heads, head_size]`.
    """

    rows: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor


def flash_cache(num_blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`[2, num_blocks, block_size, num_kv_heads, head_size]`: all keys, then all values."""
    raw = torch.zeros(2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, dtype=dtype, device=DEVICE)
    return raw[0], raw[1]


def packed_cache(num_blocks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`[num_blocks, num_kv_heads, block_size, 2 * head_size]`: key and value of a token side by side, heads outside."""
    raw = torch.zeros(num_blocks, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=dtype, device=DEVICE).transpose(1, 2)
    return raw[..., :HEAD_SIZE], raw[..., HEAD_SIZE:]


def make_layers(
    num_tokens: int,
    cache_of: Callable[[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = flash_cache,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> list[Layer]:
    """32 layers with sources of their own and room for every token in a block of its own."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    shape = (2, num_tokens, NUM_KV_HEADS, HEAD_SIZE)
    return [
        Layer(
            torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16),
            *cache_of(num_blocks_for(num_tokens), dtype),
        )
        for _ in range(NUM_LAYERS)
    ]


def num_blocks_for(num_tokens: int) -> int:
    """Blocks of a layer's cache: those that a prefill fills and as many again, at least one a decode token."""
    return max(2 * num_tokens // BLOCK_SIZE, num_tokens if num_tokens <= 256 else 0) + 1


def prefill_slots(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Slots of consecutive tokens that fill whole blocks, the blocks in random order."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(num_blocks_for(num_tokens) - 1, generator=generator)[: num_tokens // BLOCK_SIZE] + 1
    return (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten().to(DEVICE)


def decode_slots(num_reqs: int, seed: int = 0) -> torch.Tensor:
    """One slot a request, each in a block of its own, at any offset."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(num_blocks_for(num_reqs) - 1, generator=generator)[:num_reqs] + 1
    return (blocks * BLOCK_SIZE + torch.randint(BLOCK_SIZE, (num_reqs,), generator=generator)).to(DEVICE)


def write_all_layers(kernels: Any, layers: Sequence[Layer], slots: torch.Tensor, **scales: torch.Tensor) -> None:
    """One `reshape_and_cache` a layer, as a forward pass makes them."""
    for layer in layers:
        kernels.reshape_and_cache(
            key=layer.rows[0],
            value=layer.rows[1],
            key_cache=layer.key_cache,
            value_cache=layer.value_cache,
            slot_mapping=slots,
            **scales,
        )


def copy_all_layers(layers: Sequence[Layer], targets: Sequence[torch.Tensor]) -> None:
    """One device-to-device copy a layer, of the same bytes."""
    for layer, target in zip(layers, targets, strict=True):
        target.copy_(layer.rows)


def check_written(layers: Sequence[Layer], slots: torch.Tensor) -> None:
    """Every row lies at its slot, byte for byte: a bench of a kernel that does not write is worth nothing.

    An 8-bit cache holds the rows rounded, at a scale of 1; they are far from its largest number.
    """
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    for number, layer in enumerate(layers):
        for name, rows, cache in (("key", layer.rows[0], layer.key_cache), ("value", layer.rows[1], layer.value_cache)):
            written = cache.view(torch.uint8)[blocks, offsets]
            if not torch.equal(written, rows.to(cache.dtype).view(torch.uint8)):
                raise AssertionError(f"layer {number}: a {name} is not at its slot")


@triton.jit
def empty_kernel():
    """What a launch costs by itself."""


def launch_empty(count: int) -> None:
    """That many launches of a kernel that does nothing."""
    for _ in range(count):
        empty_kernel[(1,)]()


def slot_mapping_run(kernels: Any, num_reqs: int, tokens_each: int) -> Callable[[], None]:
    """Slot mapping of one prefill step for one group, over tables of random blocks."""
    generator = torch.Generator().manual_seed(num_reqs)
    num_tokens, width = num_reqs * tokens_each, -(-tokens_each // BLOCK_SIZE)
    blocks = torch.randperm(num_reqs * width, generator=generator).to(torch.int32) + 1
    tables = SlotTables.of([blocks.view(num_reqs, width).to(DEVICE)], [BLOCK_SIZE])
    rows = torch.arange(num_reqs, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=DEVICE) * tokens_each
    first = torch.zeros(num_reqs, dtype=torch.int64, device=DEVICE)
    slots = torch.empty(1, num_tokens, dtype=torch.int64, device=DEVICE)
    expected = blocks.view(num_reqs, width)[:, :, None].long() * BLOCK_SIZE + torch.arange(BLOCK_SIZE)

    def run() -> None:
        kernels.compute_slot_mapping(
            tables=tables, rows=rows, query_start_loc=starts, first_positions=first, slot_mapping=slots
        )

    run()
    if not torch.equal(slots[0].cpu(), expected.reshape(num_reqs, -1)[:, :tokens_each].flatten()):
        raise AssertionError(f"{num_reqs} requests of {tokens_each} tokens: a slot is wrong")
    return run

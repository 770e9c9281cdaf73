"""Field report F01: addresses past 2**31 and 2**32 elements. Memory that is not touched costs nothing on a CPU."""

import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import BlockRegions, SlotTables  # noqa: E402

from tests.kernels.cache_layouts import integers, longs, rows_of  # noqa: E402
from tests.kernels.kernel_sets import KERNEL_SETS, device, kernel_set  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.parametrize("name", KERNEL_SETS)]


@attrs.frozen(eq=False)
class Pool:
    """Zeros. On a CPU a file in memory, of which only what is written exists, and which says where that is."""

    elements: Any
    file: int | None

    @classmethod
    def of(cls, num_elements: int, dtype: Any) -> "Pool":
        num_bytes = num_elements * dtype.itemsize
        try:
            if device().type == "cuda":
                return cls(torch.zeros(num_elements, dtype=dtype, device=device()), None)
            file = os.memfd_create("pool")
            os.ftruncate(file, num_bytes)
            return cls(torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8).view(dtype), file)
        except (OSError, torch.OutOfMemoryError) as error:
            pytest.skip(f"{num_bytes / 2**30:.1f} GiB cannot be had here: {error}")

    def changed_blocks(self, num_blocks: int) -> list[int]:
        """The blocks, of equal size and one after the other, that hold anything but zeros."""
        raw = self.elements.view(torch.uint8)
        changed: set[int] = set()
        for begin, end in self._written_ranges(len(raw)):
            places = raw[begin:end].nonzero().flatten() + begin
            changed.update((places // (len(raw) // num_blocks)).unique().tolist())
        return sorted(changed)

    def _written_ranges(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        if self.file is None:
            # A GPU counts the elements of one search in 32 bits.
            yield from ((begin, min(begin + (1 << 30), num_bytes)) for begin in range(0, num_bytes, 1 << 30))
            return
        end = 0
        while True:
            try:
                begin = os.lseek(self.file, end, os.SEEK_DATA)
            except OSError:
                # There is no data behind the last range.
                return
            end = os.lseek(self.file, begin, os.SEEK_HOLE)
            yield begin, end


@pytest.fixture
def pool() -> Iterator[Callable[[int, Any], Pool]]:
    """Makes pools, and closes their files."""
    pools: list[Pool] = []

    def make(num_elements: int, dtype: Any) -> Pool:
        pools.append(Pool.of(num_elements, dtype))
        return pools[-1]

    yield make
    for made in pools:
        if made.file is not None:
            os.close(made.file)


def read_back(kernels: Any, blocks: list[int], **caches: Any) -> tuple[Any, Any]:
    """The first token of each block."""
    count = len(blocks)
    return kernels.gather_cache(
        **caches,
        block_table=integers(*blocks).view(count, 1),
        rows=torch.arange(count, dtype=torch.int32, device=device()),
        cu_seqlens=torch.arange(count + 1, dtype=torch.int32, device=device()),
        num_tokens=count,
    )


@pytest.mark.parametrize(
    ("dtype", "num_blocks", "blocks"),
    [
        pytest.param(torch.bfloat16, 32_770, [0, 32_767, 32_768, 32_769], id="2**31 elements"),
        pytest.param(torch.float8_e5m2, 65_538, [1, 32_768, 65_535, 65_536, 65_537], id="2**32 elements"),
    ],
)
def test_blocks_past_the_limit_are_written_and_read_and_no_others(
    name: str, pool: Callable[[int, Any], Pool], dtype: Any, num_blocks: int, blocks: list[int]
) -> None:
    kernels = kernel_set(name)
    # The values are slim, so that only the keys are past the limit.
    key_pool, value_pool = (pool(num_blocks * 16 * 32 * head_size, dtype) for head_size in (128, 8))
    key_cache, value_cache = (
        made.elements.view(num_blocks, 16, 32, head_size) for made, head_size in ((key_pool, 128), (value_pool, 8))
    )
    key, value = rows_of(len(blocks), 32, 128, dtype)[0], rows_of(len(blocks), 32, 8, dtype)[1]
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    kernels.reshape_and_cache(key=key, value=value, **caches, slot_mapping=longs(*(block * 16 for block in blocks)))
    assert key_pool.changed_blocks(num_blocks) == value_pool.changed_blocks(num_blocks) == blocks
    for read, rows in zip(read_back(kernels, blocks, **caches), (key, value), strict=True):
        assert torch.equal(read.view(torch.uint8), rows.contiguous().view(torch.uint8))


def test_an_interleaved_cache_past_65536_blocks_of_8_heads(name: str, pool: Callable[[int, Any], Pool]) -> None:
    kernels, blocks = kernel_set(name), [0, 65_535, 65_536, 65_537]
    made = pool(65_538 * 2 * 16 * 8 * 128, torch.bfloat16)
    cache = made.elements.view(65_538, 2, 16, 8, 128)
    key_cache, value_cache = cache.unbind(1)
    assert key_cache.stride(0) * 65_536 == 2**31
    key, value = rows_of(4, 8, 128, torch.bfloat16)
    slots = longs(*(block * 16 + 15 for block in blocks))
    kernels.reshape_and_cache(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots)
    assert torch.equal(key_cache[blocks, 15], key)
    assert torch.equal(value_cache[blocks, 15], value)
    kernels.copy_blocks(caches=BlockRegions.of([cache]), sources=longs(65_537), targets=longs(65_534))
    assert torch.equal(cache[65_534], cache[65_537])
    assert made.changed_blocks(65_538) == [0, 65_534, 65_535, 65_536, 65_537]


def test_a_latent_cache_past_2_to_the_34_elements(name: str, pool: Callable[[int, Any], Pool]) -> None:
    kernels, pages = kernel_set(name), [0, 1 << 19, 1 << 20]
    made = pool((1 << 34) + 16_384, torch.float8_e5m2)
    cache = made.elements.as_strided(((1 << 20) + 1, 16, 576), (16_384, 1024, 1))
    rows = rows_of(3, 1, 576, torch.float8_e5m2)[0][:, 0]
    kernels.concat_and_cache_mla(
        kv_c=rows[:, :512], k_pe=rows[:, 512:], cache=cache, slot_mapping=longs(*(page * 16 + 7 for page in pages))
    )
    read = kernels.gather_mla_cache(
        cache=cache,
        block_table=integers(*pages).view(3, 1),
        rows=integers(0, 1, 2),
        cu_seqlens=integers(0, 1, 2, 3),
        first_positions=longs(7, 7, 7),
        num_tokens=3,
    )
    assert torch.equal(read.view(torch.uint8), rows.contiguous().view(torch.uint8))
    assert made.changed_blocks((1 << 20) + 1) == pages


def test_slots_past_2_to_the_31_and_32_are_mapped_written_read_and_attended(
    name: str, pool: Callable[[int, Any], Pool]
) -> None:
    kernels, num_blocks, blocks = kernel_set(name), (1 << 28) + 2, [0, 1 << 27, 1 << 28]
    pools = [pool(num_blocks * 16, torch.float8_e5m2) for _ in "kv"]
    caches = {
        view: made.elements.view(num_blocks, 16, 1, 1)
        for view, made in zip(("key_cache", "value_cache"), pools, strict=True)
    }
    table, slots = integers(*blocks).view(1, 3), torch.zeros(1, 48, dtype=torch.int64, device=device())
    kernels.compute_slot_mapping(
        tables=SlotTables.of([table], [16]),
        rows=integers(0),
        query_start_loc=integers(0, 48),
        first_positions=longs(0),
        slot_mapping=slots,
    )
    assert slots[0, [16, 47]].tolist() == [1 << 31, (1 << 32) + 15]
    rows = torch.arange(1, 49, device=device()).half().to(torch.float8_e5m2).view(48, 1, 1)
    kernels.reshape_and_cache(key=rows, value=rows, **caches, slot_mapping=slots[0])
    assert [made.changed_blocks(num_blocks) for made in pools] == [blocks] * 2
    batch = {"block_table": table, "rows": integers(0)}
    for read in kernels.gather_cache(**caches, **batch, cu_seqlens=integers(0, 48), num_tokens=48):
        assert torch.equal(read.view(torch.uint8), rows.view(torch.uint8))
    # Equal weights: the result is the mean of what is stored.
    ones = {"k_scale": torch.ones(1, device=device()), "v_scale": torch.ones(1, device=device())}
    mean = kernels.paged_attention(
        query=torch.zeros(1, 1, 1, device=device()),
        **caches,
        **batch,
        query_start_loc=integers(0, 1),
        seq_lens=integers(48),
        scale=1.0,
        **ones,
    )
    assert abs(mean.item() - rows.float().mean().item()) < 1e-4

"""Cache writes: every byte where plain indexing puts it, and no other byte changed, in every layout and shape."""

from itertools import combinations, product
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import KernelInputError, MissingScaleWarning, kv_scale  # noqa: E402

from tests.kernels.cache_layouts import (  # noqa: E402
    FLOATS,
    FP8,
    LAYOUTS,
    PagedCache,
    distinct_slots,
    longs,
    paged_cache,
    rows_of,
    written_by_indexing,
)
from tests.kernels.kernel_sets import device  # noqa: E402
from tests.kernels.pairwise import pairwise_cover  # noqa: E402

pytestmark = pytest.mark.torch

HEAD_SIZES = (64, 80, 96, 112, 120, 128, 192, 256, 576)
KV_HEADS = (1, 2, 3, 8)
BLOCK_SIZES = (1, 8, 16, 17, 128, 256, 512, 784)
NUM_TOKENS = (0, 1, 7, 8193)
FACTORS = (HEAD_SIZES, KV_HEADS, BLOCK_SIZES, NUM_TOKENS, FLOATS + FP8, LAYOUTS)
# The interpreter takes a millisecond a token.
FEW_TOKENS = NUM_TOKENS if torch.cuda.is_available() else NUM_TOKENS[:-1]


def cover(num_tokens: tuple[int, ...]) -> list[Any]:
    rows = pairwise_cover([num_tokens if factor is NUM_TOKENS else factor for factor in FACTORS])
    return [pytest.param(*row, id="-".join(str(value).removeprefix("torch.") for value in row)) for row in rows]


def scales_for(dtype: Any) -> dict[str, Any]:
    """Different scales for keys and values of 8-bit caches; none for others."""
    if dtype not in FP8:
        return {}
    return {name: kv_scale(value, name=name, device=device()) for name, value in (("k_scale", 0.37), ("v_scale", 2.1))}


def input_dtype(cache_dtype: Any) -> Any:
    return torch.bfloat16 if cache_dtype in FP8 else cache_dtype


def written(kernels: Any, cache: PagedCache, key: Any, value: Any, slots: Any, **options: Any) -> PagedCache:
    write = cache.method(kernels, "reshape_and_cache")
    write(key=key, value=value, **cache.views(), slot_mapping=slots, **scales_for(cache.key.dtype), **options)
    return cache


def stored(rows: Any, cache: Any, scale: Any) -> Any:
    """What the reference stores: a clamped product, cast by torch."""
    if rows.dtype == cache.dtype:
        return rows
    largest = torch.finfo(cache.dtype).max
    return (rows.float() * (1 / scale)).clamp(-largest, largest).to(cache.dtype)


def test_the_twins_get_every_pair_of_values_of_every_two_factors() -> None:
    """Counted from the test's own parameters, not by what made them."""
    marks = test_the_twins_write_what_plain_indexing_writes.pytestmark
    (marked,) = [mark for mark in marks if mark.name == "parametrize"]
    rows = [case.values for case in marked.args[1]]
    for (i, first), (j, second) in combinations(enumerate(FACTORS), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(first, second)), (i, j)
    assert sum(row[3] == 8193 for row in rows) >= len(HEAD_SIZES)


@pytest.mark.parametrize(("head_size", "heads", "block_size", "num_tokens", "dtype", "layout"), cover(NUM_TOKENS))
def test_the_twins_write_what_plain_indexing_writes(
    twins: Any, head_size: int, heads: int, block_size: int, num_tokens: int, dtype: Any, layout: str
) -> None:
    shape = (num_tokens // block_size + 2, block_size, heads, head_size, dtype)
    key, value = rows_of(num_tokens, heads, head_size, input_dtype(dtype))
    slots = distinct_slots(shape[0] * block_size, num_tokens)
    slots[1::5] = -1
    expected = paged_cache(layout, *shape)
    scales = scales_for(dtype)
    for rows, cache, name in zip((key, value), expected.logical(), ("k_scale", "v_scale"), strict=True):
        written_by_indexing(cache, stored(rows, cache, scales.get(name)), slots.tolist())
    cache = written(twins, paged_cache(layout, *shape), key, value, slots, checked=True)
    assert torch.equal(cache.bytes(), expected.bytes())


@pytest.mark.parametrize(("head_size", "heads", "block_size", "num_tokens", "dtype", "layout"), cover(FEW_TOKENS))
def test_triton_writes_the_bytes_of_the_twins(
    triton_kernels: Any,
    twins: Any,
    head_size: int,
    heads: int,
    block_size: int,
    num_tokens: int,
    dtype: Any,
    layout: str,
) -> None:
    shape = (num_tokens // block_size + 2, block_size, heads, head_size, dtype)
    key, value = rows_of(num_tokens + 2, heads, head_size, input_dtype(dtype))
    slots = distinct_slots(shape[0] * block_size, num_tokens)
    slots[1::5] = -1
    expected, cache = (
        written(kernels, paged_cache(layout, *shape), key, value, slots) for kernels in (twins, triton_kernels)
    )
    assert torch.equal(cache.bytes(), expected.bytes())


@pytest.mark.parametrize("layout", ["NHD", "packed", "classic"])
def test_keys_and_values_may_have_different_head_sizes(kernels: Any, layout: str) -> None:
    (key_cache, value_cache), heads = (paged_cache(layout, 3, 8, 2, size, torch.float16) for size in (192, 128)), 2
    key, value = rows_of(5, heads, 192, torch.float16)[0], rows_of(5, heads, 128, torch.float16)[1]
    cache = PagedCache(key_cache.raw, key_cache.key, value_cache.value, layout == "classic")
    expected = [view.clone() for view in cache.logical()]
    for rows, view in zip((key, value), expected, strict=True):
        written_by_indexing(view, rows, [9, 0, 23, 4, 11])
    written(kernels, cache, key, value, longs(9, 0, 23, 4, 11))
    assert all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(cache.logical(), expected, strict=True)
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_of_nan_are_stored_as_they_are(kernels: Any, dtype: Any) -> None:
    word = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    bits = torch.full((3, 2, 16), -5, dtype=word, device=device())
    cache = paged_cache("NHD", 2, 8, 2, 16, dtype)
    written(kernels, cache, bits.view(dtype), bits.view(dtype), longs(0, 5, 15))
    assert (cache.key.view(word)[0, 0] == -5).all()
    assert (cache.value.view(word)[1, 7] == -5).all()


def test_a_repeated_call_with_other_tokens_and_slots_writes_them(kernels: Any) -> None:
    cache, expected = (paged_cache("HND", 4, 16, 3, 64, torch.bfloat16) for _ in range(2))
    for seed, num_tokens in enumerate((4, 1, 6)):
        key, value = rows_of(num_tokens, 3, 64, torch.bfloat16, seed)
        slots = distinct_slots(64, num_tokens, seed)
        written(kernels, cache, key, value, slots)
        for rows, view in zip((key, value), expected.logical(), strict=True):
            written_by_indexing(view, rows, slots.tolist())
    assert torch.equal(cache.bytes(), expected.bytes())


def test_uint8_storage_is_written_in_the_format_that_is_named(kernels: Any) -> None:
    for name, dtype in (("fp8", FP8[0]), ("fp8_e4m3", FP8[0]), ("fp8_e5m2", FP8[1])):
        key, value = rows_of(3, 2, 16, torch.float32)
        expected = written(kernels, paged_cache("NHD", 2, 8, 2, 16, dtype), key, value, longs(1, 9, 3))
        named = paged_cache("NHD", 2, 8, 2, 16, torch.uint8)
        scales = scales_for(dtype)
        kernels.reshape_and_cache(
            key=key, value=value, **named.views(), slot_mapping=longs(1, 9, 3), kv_cache_dtype=name, **scales
        )
        assert torch.equal(named.bytes(), expected.bytes())


def refusals() -> list[Any]:
    def dense(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.zeros(*shape, dtype=dtype, device=device())

    def case(name: str, message: str, **changes: Any) -> Any:
        return pytest.param(changes, message, id=name)

    cache = dense(4, 16, 2, 8)
    return [
        case("a last stride of 2", "key needs a last stride of 1", key=dense(5, 2, 16)[..., ::2]),
        case(
            "a cache with a last stride of 2",
            "key_cache needs a last stride of 1",
            key_cache=dense(4, 16, 2, 16)[..., ::2],
        ),
        case(
            "an expanded cache",
            "value_cache holds two elements in one place",
            value_cache=cache[:1].expand(4, -1, -1, -1),
        ),
        case(
            "overlapping blocks",
            "key_cache holds two",
            key_cache=dense(4096).as_strided((4, 16, 2, 8), (128, 16, 8, 1)),
        ),
        case("other heads", r"key must be \[num_tokens, 2, 8\]", key=dense(5, 4, 8)),
        case("another head size", r"value must be \[num_tokens, 2, 8\]", value=dense(5, 2, 16)),
        case(
            "another dtype",
            "key is torch.float32 and its cache torch.bfloat16",
            key=dense(5, 2, 8, dtype=torch.float32),
        ),
        case("a flat cache", "key_cache has 3 dimensions, not 4", key_cache=dense(64, 2, 8)),
        case("caches of two sizes", "do not belong together", value_cache=dense(5, 16, 2, 8)),
        case("caches of two dtypes", "do not belong together", value_cache=dense(4, 16, 2, 8, dtype=torch.float16)),
        case("int32 slots", "slot_mapping must be a contiguous torch.int64 vector", slot_mapping=longs(1, 2).int()),
        case("strided slots", "slot_mapping must be a contiguous", slot_mapping=longs(1, 2, 3, 4)[::2]),
        case("more slots than tokens", "6 slots, 5 keys", slot_mapping=longs(1, 2, 3, 4, 5, 6)),
        case("fewer values than keys", "5 keys .* 4 values", value=dense(4, 2, 8)),
        case("a scale that nothing uses", "k_scale is given, but nothing is quantised", k_scale=torch.ones(1)),
        case("an integer cache", "key_cache is torch.int8", key_cache=dense(4, 16, 2, 8, dtype=torch.int8)),
        case("bytes of no format", "torch.uint8 with kv_cache_dtype", key_cache=dense(4, 16, 2, 8, dtype=torch.uint8)),
        case("an unknown format", "kv_cache_dtype 'int4'", kv_cache_dtype="int4"),
        case("a format that is not the dtype", "kv_cache_dtype 'fp8' is", kv_cache_dtype="fp8"),
    ]


@pytest.mark.parametrize(("changes", "message"), refusals())
def test_what_cannot_be_written_is_refused_and_changes_nothing(kernels: Any, changes: Any, message: str) -> None:
    rows = torch.ones(5, 2, 8, dtype=torch.bfloat16, device=device())
    caches = {
        name: torch.zeros(4, 16, 2, 8, dtype=torch.bfloat16, device=device()) for name in ("key_cache", "value_cache")
    }
    call = {"key": rows, "value": rows, "slot_mapping": longs(3, 4), **caches}
    with pytest.raises(KernelInputError, match=message):
        kernels.reshape_and_cache(**(call | changes))
    assert not any(bool(cache.any()) for cache in caches.values())


def test_a_call_that_is_refused_later_is_refused_although_its_layout_is_known(kernels: Any) -> None:
    cache = paged_cache("NHD", 4, 16, 2, 8, torch.float16)
    key, value = rows_of(3, 2, 8, torch.float16)
    written(kernels, cache, key, value, longs(0, 1, 2))
    before = cache.bytes().clone()
    with pytest.raises(KernelInputError, match="4 slots, 3 keys"):
        written(kernels, cache, key, value, longs(0, 1, 2, 3))
    with pytest.raises(KernelInputError, match="slot 64 of token 1"):
        written(kernels, cache, key, value, longs(0, 64, 2), checked=True)
    assert torch.equal(cache.bytes(), before)


def test_a_missing_scale_is_said_and_is_one(kernels: Any) -> None:
    key, value = rows_of(2, 2, 16, torch.float16)
    cache = paged_cache("NHD", 2, 8, 2, 16, torch.float8_e4m3fn)
    with (
        pytest.warns(MissingScaleWarning, match="v_scale is missing"),
        pytest.warns(MissingScaleWarning, match="k_scale"),
    ):
        kernels.reshape_and_cache(key=key, value=value, **cache.views(), slot_mapping=longs(3, 4))
    assert torch.equal(cache.key[0, 3:5].float(), stored(key, cache.key, torch.ones(1, device=device())).float())


def prompt_slots(*chunks: tuple[int, int], block_size: int, num_blocks: int) -> list[int]:
    """Slots of one chunk after the other: (first position, tokens) each, in blocks of its own, in falling order."""
    slots: list[int] = []
    block = num_blocks
    for first, count in chunks:
        blocks = -(-(first + count) // block_size)
        block -= blocks
        last = block + blocks - 1
        positions = range(first, first + count)
        slots += [(last - position // block_size) * block_size + position % block_size for position in positions]
    return slots


# Neighbours from a block's start, from its middle, behind a chunk of an odd length; chunks too short for any; a token
# of padding, and a stranger's token, among neighbours; neighbours in falling order, and ones that do not begin at a
# multiple of what an access holds.
RUNS = {
    "chunks": prompt_slots((0, 19), (5, 20), (16, 9), (3, 2), (0, 33), block_size=16, num_blocks=12),
    "one chunk of whole blocks": prompt_slots((0, 32), block_size=16, num_blocks=12),
    "decodes": [16 * block + 5 for block in range(12)],
    "padding among them": [*range(16, 20), -1, *range(21, 32), -1],
    "a stranger among them": [*range(16, 20), 77, *range(21, 32)],
    "falling": [*range(31, 15, -1)],
    "off by one": [*range(17, 25), *range(33, 47)],
    "past the end": [*range(184, 200)],
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(("dtype", "num_heads", "head_size"), [(torch.bfloat16, 3, 64), (torch.float32, 1, 80)])
def test_values_of_neighbours_in_a_classic_block_are_stored_where_each_alone_would_be(
    kernels: Any, name: str, dtype: Any, num_heads: int, head_size: int
) -> None:
    slots, shape = RUNS[name], (12, 16, num_heads, head_size)
    key, value = rows_of(len(slots) + 3, num_heads, head_size, dtype)
    cache = written(kernels, paged_cache("classic", *shape, dtype), key, value, longs(*slots))
    expected = paged_cache("classic", *shape, dtype)
    inside = [slot if slot < 12 * 16 else -1 for slot in slots]
    for rows, part in zip((key, value), expected.logical(), strict=True):
        written_by_indexing(part, rows, inside)
    assert torch.equal(cache.bytes(), expected.bytes())

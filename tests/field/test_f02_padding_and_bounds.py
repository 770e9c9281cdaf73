"""Field report F02: padded tokens hold NaN and write nowhere; slots past the end are reported, and never written."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import KernelInputError  # noqa: E402

from tests.kernels.cache_layouts import LAYOUTS, PagedCache, longs, paged_cache, rows_of  # noqa: E402
from tests.kernels.kernel_sets import KERNEL_SETS, kernel_set  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.parametrize("name", KERNEL_SETS),
    pytest.mark.parametrize("layout", LAYOUTS),
]


def zeroed(layout: str) -> PagedCache:
    """Four blocks of 16 tokens."""
    cache = paged_cache(layout, 4, 16, 2, 32, torch.bfloat16)
    cache.raw.zero_()
    return cache


def write(name: str, cache: PagedCache, key: Any, value: Any, slots: Any, **options: Any) -> None:
    method = cache.method(kernel_set(name), "reshape_and_cache")
    method(key=key, value=value, **cache.views(), slot_mapping=slots, **options)


def changed_slots(cache: PagedCache) -> list[int]:
    """Slots that hold anything, the same for keys and values."""
    key, value = (view.reshape(64, -1).any(1).nonzero().flatten().tolist() for view in cache.logical())
    assert key == value
    return key


def test_padding_with_nan_changes_no_slot_and_leaves_no_nan(name: str, layout: str) -> None:
    key, value = rows_of(4, 2, 32, torch.bfloat16)
    key[1] = key[3] = value[1] = value[3] = float("nan")
    cache = zeroed(layout)
    write(name, cache, key, value, longs(0, -1, 5, -1))
    # -1 // 16 is block -1 and -1 % 16 offset 15 in Python: the trap is the very last slot.
    assert changed_slots(cache) == [0, 5]
    assert not cache.raw.isnan().any()


def test_more_keys_than_slots_are_padding_of_a_graph(name: str, layout: str) -> None:
    key, value = rows_of(8, 2, 32, torch.bfloat16)
    cache = zeroed(layout)
    write(name, cache, key, value, longs(7, 8, 9, 10, 11))
    assert changed_slots(cache) == [7, 8, 9, 10, 11]


def test_a_slot_past_the_end_is_not_written_and_checked_mode_reports_it(name: str, layout: str) -> None:
    key, value = rows_of(3, 2, 32, torch.bfloat16)
    cache = zeroed(layout)
    with pytest.raises(KernelInputError, match=r"1 of 3 slots .*: slot 64 of token 1; slots are 0 to 63, or -1"):
        write(name, cache, key, value, longs(3, 64, 4), checked=True)
    assert changed_slots(cache) == []
    write(name, cache, key, value, longs(3, 64, 4))
    assert changed_slots(cache) == [3, 4]


def test_slots_refilled_in_place_are_the_slots_of_the_next_call(name: str, layout: str) -> None:
    slots = longs(1, 2, -1, -1)
    cache, seen = zeroed(layout), set()
    for step in ([1, 2, -1, -1], [40, -1, 63, 0], [-1, -1, -1, -1], [9, 10, 11, 12]):
        slots.copy_(longs(*step))
        write(name, cache, *rows_of(4, 2, 32, torch.bfloat16), slots)
        seen |= {slot for slot in step if slot >= 0}
        assert changed_slots(cache) == sorted(seen)


def test_many_bad_slots_are_counted_and_the_first_are_listed(name: str, layout: str) -> None:
    key, value = rows_of(20, 2, 32, torch.bfloat16)
    with pytest.raises(KernelInputError, match=r"20 of 20 slots .* slot 107 of token 7 and 12 more; slots are 0 to 63"):
        write(name, zeroed(layout), key, value, longs(*range(100, 120)), checked=True)

"""Extra keys: which blocks they enter, how they are encoded, and when a request must not be cached."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.core.keys.extra_keys import ExtraKeys, LoraIdentity, MultimodalItem, encode_extra_keys

VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])) | st.binary(),
    lambda values: st.lists(values, max_size=3).map(tuple),
    max_leaves=6,
)


@given(VALUES, VALUES)
def test_two_extra_keys_share_an_encoding_only_if_they_are_equal(first, second) -> None:
    assert (encode_extra_keys(first) == encode_extra_keys(second)) == (first == second)


@given(VALUES, VALUES)
def test_no_encoding_is_the_beginning_of_another(first, second) -> None:
    if first != second:
        assert not encode_extra_keys(first).startswith(encode_extra_keys(second))


@pytest.mark.parametrize("value", [1.5, True, ["list"], {"a": 1}])
def test_a_value_without_a_canonical_encoding_is_refused(value) -> None:
    with pytest.raises(InputError, match=type(value).__name__):
        encode_extra_keys((value,))


def test_without_extra_keys_no_block_has_any() -> None:
    assert ExtraKeys().for_blocks(0, 3, 16) is None


def test_the_salt_enters_the_first_block_only() -> None:
    keys = ExtraKeys(cache_salt="s")
    assert keys.for_blocks(0, 3, 16) == [(("cache_salt", "s"),), (), ()]
    assert keys.for_blocks(1, 3, 16) == [(), ()]


@pytest.mark.parametrize("salt", ["", "\ud800", 7, b"bytes"])
def test_a_salt_that_cannot_isolate_is_refused(salt) -> None:
    with pytest.raises(InputError, match="cache_salt"):
        ExtraKeys(cache_salt=salt)


def test_the_adapter_enters_every_block_by_name_and_content() -> None:
    keys = ExtraKeys(lora=LoraIdentity("sql", "v1"))
    assert keys.for_blocks(0, 2, 16) == [(("lora", "sql", "v1"),)] * 2


def test_an_item_enters_the_blocks_it_overlaps_with_its_place_in_them() -> None:
    keys = ExtraKeys(multimodal=[MultimodalItem("a", 6, 7)])  # tokens 6..12 of blocks [4,8) [8,12) [12,16)
    expected = [(), (("multimodal", "a", 2, 2),), (("multimodal", "a", -2, 4),), (("multimodal", "a", -6, 1),), ()]
    assert keys.for_blocks(0, 5, 4) == expected
    assert keys.for_blocks(2, 4, 4) == expected[2:4]


def test_two_items_in_one_block_are_bound_in_the_order_of_their_places() -> None:
    first, second = MultimodalItem("z", 0, 2), MultimodalItem("a", 2, 2)
    expected = [(("multimodal", "z", 0, 2), ("multimodal", "a", 2, 2))]
    assert ExtraKeys(multimodal=[first, second]).for_blocks(0, 1, 4) == expected
    assert ExtraKeys(multimodal=[second, first]).for_blocks(0, 1, 4) == expected


@given(
    items=st.lists(st.builds(MultimodalItem, st.text("ab", min_size=1), st.integers(0, 30), st.integers(1, 20))),
    salt=st.none() | st.just("s"),
    cut=st.integers(0, 12),
)
def test_blocks_may_be_asked_for_in_any_pieces(items: list[MultimodalItem], salt: str | None, cut: int) -> None:
    keys = ExtraKeys(cache_salt=salt, multimodal=items)
    whole = keys.for_blocks(0, 12, 4)
    assert (keys.for_blocks(0, cut, 4) or []) + (keys.for_blocks(cut, 12, 4) or []) == (whole or [])


def test_truncation_drops_items_behind_the_end_and_cuts_the_one_across_it() -> None:
    keys = ExtraKeys("s", multimodal=[MultimodalItem("a", 0, 4), MultimodalItem("b", 4, 4), MultimodalItem("c", 8, 4)])
    assert keys.truncated(12) is keys
    assert keys.truncated(6) == ExtraKeys("s", multimodal=[MultimodalItem("a", 0, 4), MultimodalItem("b", 4, 2)])
    assert keys.truncated(4) == ExtraKeys("s", multimodal=[MultimodalItem("a", 0, 4)])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (ExtraKeys(lora=LoraIdentity("sql", "")), "fingerprint"),
        (ExtraKeys(lora=LoraIdentity("sql", None)), "fingerprint"),
        (ExtraKeys(lora=LoraIdentity("", "v1")), "name"),
        (ExtraKeys(lora="sql"), "LoraIdentity"),
        (ExtraKeys(multimodal=[MultimodalItem("", 0, 4)]), "item 0: content_id"),
        (ExtraKeys(multimodal=[MultimodalItem(None, 0, 4)]), "content_id"),
        (ExtraKeys(multimodal=[MultimodalItem(True, 0, 4)]), "content_id"),
        (ExtraKeys(multimodal=[MultimodalItem("\udfff", 0, 4)]), "content_id"),
        (ExtraKeys(multimodal=[MultimodalItem("a", -1, 4)]), "offset"),
        (ExtraKeys(multimodal=[MultimodalItem("a", 1.0, 4)]), "offset"),
        (ExtraKeys(multimodal=[MultimodalItem("a", 0, 0)]), "num_tokens"),
        (ExtraKeys(multimodal=[MultimodalItem("a", 0, 4), MultimodalItem("b", 98, 3)]), r"item 1: .*\[98, 101\)"),
        (ExtraKeys(multimodal=[{"hash": "a"}]), "not a MultimodalItem"),
        (ExtraKeys(multimodal={"hash": "a"}), "not a MultimodalItem"),
        (ExtraKeys(multimodal=7), "not a MultimodalItem"),
    ],
)
def test_malformed_extra_keys_are_a_reason_not_to_cache(keys: ExtraKeys, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(keys.reason_not_cacheable(100))


def test_well_formed_extra_keys_are_none() -> None:
    keys = ExtraKeys("s", LoraIdentity("sql", b"\x9f"), [MultimodalItem(1 << 200, 0, 100), MultimodalItem(b"b", 0, 1)])
    assert keys.reason_not_cacheable(100) is None
    assert ExtraKeys(multimodal=None).reason_not_cacheable(0) is None

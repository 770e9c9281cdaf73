"""The key source over tokens: lazy, incremental, truncated with its tokens, closed when it cannot know."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import InputError, MisuseError
from kvledger.core.keys.block_hash import block_hasher
from kvledger.core.keys.extra_keys import ExtraKeys, MultimodalItem
from kvledger.core.keys.token_keys import TokenKeySource

SHA256 = block_hasher()
IMAGE = 9


class CountingHasher:
    """Counts the blocks that it hashes."""

    name, root, num_hashed = SHA256.name, SHA256.root, 0

    def chain(self, token_ids, block_size, parent=None, extra_keys=None) -> list[bytes]:
        keys = SHA256.chain(token_ids, block_size, parent, extra_keys)
        self.num_hashed += len(keys)
        return keys


def all_keys(source: TokenKeySource) -> list[bytes]:
    return source.keys(0, source.num_blocks)


def test_keys_are_the_chain_of_the_complete_blocks() -> None:
    source = TokenKeySource(list(range(50)), SHA256, 16)
    assert (source.num_tokens, source.num_blocks) == (50, 3)
    assert all_keys(source) == SHA256.chain(range(50), 16)
    assert source.keys(1, 2) == SHA256.chain(range(50), 16)[1:2]


def test_a_block_is_hashed_once_and_not_before_it_is_asked_for() -> None:
    hasher = CountingHasher()
    source = TokenKeySource(np.arange(64), hasher, 16)
    assert hasher.num_hashed == 0
    source.keys(0, 2)
    source.keys(0, 2)
    assert hasher.num_hashed == 2
    source.append(range(16))
    all_keys(source)
    assert hasher.num_hashed == 5


STEPS = st.lists(
    st.one_of(
        st.lists(st.one_of(st.integers(0, 5), st.just(1 << 40)), max_size=9).map(lambda tokens: ("append", tokens)),
        st.integers(0, 40).map(lambda num_tokens: ("truncate", num_tokens)),
        st.just(("keys", None)),
    ),
    max_size=20,
)


@given(prompt=st.lists(st.integers(0, 5)), steps=STEPS, block_size=st.integers(1, 4))
def test_after_any_appends_and_truncations_the_keys_are_those_of_the_tokens(prompt, steps, block_size) -> None:
    source, tokens = TokenKeySource(prompt, SHA256, block_size), list(prompt)
    for step, argument in steps:
        if step == "append":
            source.append(argument)
            tokens += argument
        elif step == "truncate":
            del tokens[argument:]
            source.truncate(len(tokens))
        else:
            assert all_keys(source) == SHA256.chain(tokens, block_size)
    assert all_keys(source) == SHA256.chain(tokens, block_size)


def test_truncation_takes_back_the_keys_of_blocks_that_lost_a_token() -> None:
    source = TokenKeySource(list(range(32)), SHA256, 16)
    before = all_keys(source)
    source.truncate(31)
    assert all_keys(source) == before[:1]
    source.append([500])
    assert all_keys(source)[1] != before[1]
    source.truncate(31)
    source.append([31])
    assert all_keys(source) == before


@given(
    common=st.lists(st.integers(0, 5), max_size=12),
    tails=st.tuples(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9)),
    hashed=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    block_size=st.integers(1, 4),
)
def test_keys_are_taken_over_as_far_as_tokens_are_alike_and_not_hashed_again(common, tails, hashed, block_size) -> None:
    hasher = CountingHasher()
    one, other = [TokenKeySource([*common, *tail], hasher, block_size) for tail in tails]
    for source, num_blocks in zip((one, other), hashed, strict=True):
        source.keys(0, min(num_blocks, source.num_blocks))
    kept = all_keys(TokenKeySource([*common, *tails[1]], SHA256, block_size))
    one.take_over(other)
    before = hasher.num_hashed
    assert all_keys(one) == SHA256.chain([*common, *tails[0]], block_size)
    assert all_keys(other) == kept
    known = max(min(hashed[0], one.num_blocks), min(hashed[1], other.num_blocks, len(common) // block_size))
    assert hasher.num_hashed - before <= one.num_blocks - known + other.num_blocks


@pytest.mark.parametrize(
    ("hasher", "block_size", "extra_keys"),
    [
        (SHA256, 4, ExtraKeys(cache_salt="other")),
        (SHA256, 2, ExtraKeys()),
        (CountingHasher(), 4, ExtraKeys()),
    ],
    ids=["salt", "block size", "hasher"],
)
def test_keys_of_other_names_are_not_taken_over(hasher, block_size, extra_keys) -> None:
    source, other = TokenKeySource(range(8), SHA256, 4), TokenKeySource(range(8), hasher, block_size, extra_keys)
    all_keys(other)
    with pytest.raises(MisuseError, match="cannot be taken over"):
        source.take_over(other)
    assert all_keys(source) == SHA256.chain(range(8), 4)


def test_changing_the_callers_array_changes_no_key() -> None:
    tokens = np.arange(32, dtype=np.int32)
    source = TokenKeySource(tokens, SHA256, 16)
    tokens[:] = 0
    assert all_keys(source) == SHA256.chain(range(32), 16)


def test_keys_of_blocks_that_are_not_complete_are_refused() -> None:
    source = TokenKeySource(list(range(31)), SHA256, 16)
    with pytest.raises(MisuseError, match="31 tokens so far make 1 complete blocks of 16"):
        source.keys(0, 2)
    with pytest.raises(MisuseError):
        source.keys(-1, 1)
    with pytest.raises(MisuseError, match="31 tokens to 32"):
        source.truncate(32)


def test_bad_tokens_and_block_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="hash_block_size is 0"):
        TokenKeySource([1], SHA256, 0)
    source = TokenKeySource([1], SHA256, 1)
    with pytest.raises(InputError):
        source.append([0.5])
    assert source.num_tokens == 1


def test_malformed_extra_keys_close_the_source_and_say_why() -> None:
    source = TokenKeySource([1, IMAGE, IMAGE, 2], SHA256, 4, ExtraKeys(multimodal=[MultimodalItem("", 1, 2)]))
    assert source.reason is not None
    assert "content_id" in source.reason
    assert all_keys(source) == []
    source.append([1, 2, 3, 4])
    source.truncate(4)
    assert all_keys(source) == []


def test_a_placeholder_that_no_item_covers_closes_the_source() -> None:
    covered = ExtraKeys(multimodal=[MultimodalItem("a", 1, 2)], placeholder_token_ids=[IMAGE])
    assert TokenKeySource([1, IMAGE, IMAGE, 2], SHA256, 4, covered).reason is None
    source = TokenKeySource([1, IMAGE, IMAGE, IMAGE], SHA256, 4, covered)
    assert source.reason == "token 3 is the placeholder 9, and no multimodal item covers it"
    assert all_keys(source) == []


def test_a_bare_placeholder_that_is_appended_closes_the_source() -> None:
    covered = ExtraKeys(multimodal=[MultimodalItem("a", 1, 2)], placeholder_token_ids=[IMAGE])
    source = TokenKeySource([1, IMAGE, IMAGE, 2], SHA256, 4, covered)
    assert len(all_keys(source)) == 1
    source.append([3, IMAGE, 5, 6])
    assert source.reason is not None
    assert all_keys(source) == []


def test_an_item_cut_by_truncation_is_not_the_whole_item() -> None:
    item = ExtraKeys(multimodal=[MultimodalItem("a", 1, 3)])
    whole = TokenKeySource([1, IMAGE, IMAGE, IMAGE], SHA256, 4, item)
    cut = TokenKeySource([1, IMAGE, IMAGE, IMAGE], SHA256, 4, item)
    cut.truncate(3)
    cut.append([IMAGE])
    assert all_keys(cut) != all_keys(whole)


def ahead(tokens, num_lookahead_tokens=1, **how):
    return TokenKeySource(tokens, block_hasher("sha256"), 4, num_lookahead_tokens=num_lookahead_tokens, **how)


def test_a_key_that_looks_ahead_covers_the_next_token() -> None:
    """As vLLM 0.33 makes them for EAGLE and MTP: equal blocks have one key only where equal tokens follow."""
    one, same, other = ahead([*range(8), 9]), ahead([*range(8), 9, 7]), ahead([*range(8), 8])
    assert one.keys(0, 2) == same.keys(0, 2)
    assert (one.keys(0, 1), one.keys(1, 2)) != (other.keys(0, 1), other.keys(1, 2))
    assert one.keys(0, 1) == other.keys(0, 1)
    assert one.keys(0, 2) != TokenKeySource([*range(8), 9], block_hasher("sha256"), 4).keys(0, 2)


def test_a_block_has_its_key_once_the_tokens_behind_it_are_known() -> None:
    source = ahead(list(range(8)), num_lookahead_tokens=2)
    assert (source.num_blocks, source.keys(0, 2)) == (1, ahead(list(range(6)), num_lookahead_tokens=2).keys(0, 1))
    source.append([8])
    assert source.num_blocks == 1
    source.append([9])
    assert source.keys(0, 2) == ahead(list(range(10)), num_lookahead_tokens=2).keys(0, 2)
    source.truncate(9)
    assert source.num_blocks == 1


def test_an_image_behind_a_block_enters_the_key_that_looks_ahead() -> None:
    tokens = [*range(4), 32_000, 32_000, 5, 6]
    pictures = [ExtraKeys(multimodal=[MultimodalItem(name, 4, 2)]) for name in "ab"]
    first, second = (ahead(tokens, extra_keys=picture).keys(0, 1) for picture in pictures)
    assert first != second


def test_keys_that_look_ahead_are_taken_over_as_far_as_the_next_tokens_agree() -> None:
    other = ahead(list(range(13)))
    other.keys(0, 3)
    for tokens, expected in (
        (range(13), 3),
        ([*range(12), 99], 2),
        ([*range(9), *[99] * 4], 2),
        ([*range(8), *[99] * 5], 1),
    ):
        source = ahead(list(tokens))
        source.take_over(other)
        assert len(source._chain) == expected
        assert source.keys(0, 3) == ahead(list(tokens)).keys(0, 3)

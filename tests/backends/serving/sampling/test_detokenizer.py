"""Text as it becomes certain: whole characters, and nothing of or behind a stop text."""

import pytest

pytest.importorskip("torch", reason="live serving needs torch")

from hypothesis import given
from hypothesis import strategies as st
from kvledger.backends.serving.sampling.detokenizer import MAX_UNREAD_TOKENS, Detokenizer
from kvledger.backends.serving.sampling.stop_texts import StopTexts

pytestmark = pytest.mark.torch


class Bytes:
    """A token is a byte; 256 is special."""

    def decode(self, token_ids, skip_special_tokens=False):
        assert skip_special_tokens
        return bytes([token for token in token_ids if token < 256]).decode("utf-8", "replace")


class CountedBytes(Bytes):
    """Remembers the most tokens that it was ever asked to read at once."""

    def __init__(self):
        self.most_tokens = 0

    def decode(self, token_ids, skip_special_tokens=False):
        self.most_tokens = max(self.most_tokens, len(token_ids))
        return super().decode(token_ids, skip_special_tokens)


class Words:
    """A word gets a space unless it stands first, as sentencepiece tokenizers do; 4 is special."""

    WORDS = ("so", "it", "goes", ".")

    def decode(self, token_ids, skip_special_tokens=False):
        return " ".join(self.WORDS[token] for token in token_ids if token < 4)


@given(st.text(max_size=30), st.text(max_size=10))
def test_pieces_add_up_to_the_text_and_none_holds_half_a_character(text, prompt) -> None:
    decoder = Detokenizer(Bytes(), list(prompt.encode()))
    pieces = [decoder.add(byte) for byte in text.encode()]
    assert "".join(pieces) + decoder.end() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    decoder = Detokenizer(Bytes(), [])
    assert [decoder.add(0x61), decoder.add(0xE2), decoder.add(0x82)] == ["a", "", ""]
    assert decoder.end() == "\N{REPLACEMENT CHARACTER}"


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["é", "€", "\N{GRINNING FACE}", "a", "\N{REPLACEMENT CHARACTER}"]).map(str.encode),
            st.sampled_from([b"\xff", b"\x80", b"\xe2", b"\xf0\x9f", b"\xe2\x82"]),
        ),
        max_size=60,
    )
)
def test_bytes_that_are_no_text_are_read_a_few_at_a_time_and_add_up_all_the_same(pieces) -> None:
    tokenizer, tokens = CountedBytes(), list(b"".join(pieces))
    decoder = Detokenizer(tokenizer, [])
    given_out = "".join(decoder.add(token) for token in tokens) + decoder.end()
    assert given_out == bytes(tokens).decode("utf-8", "replace")
    assert tokenizer.most_tokens <= 3 * MAX_UNREAD_TOKENS


@pytest.mark.parametrize("token", [0x80, 0xE2, 256], ids=["continuation", "beginning", "special"])
def test_an_output_of_one_token_without_a_character_costs_no_more_with_every_token(token) -> None:
    tokenizer = CountedBytes()
    decoder = Detokenizer(tokenizer, [])
    given_out = "".join(decoder.add(token) for _ in range(1_000)) + decoder.end()
    assert given_out == ("" if token == 256 else "\N{REPLACEMENT CHARACTER}" * 1_000)
    assert tokenizer.most_tokens <= 3 * MAX_UNREAD_TOKENS


def test_a_special_token_is_no_text_and_disturbs_none() -> None:
    decoder = Detokenizer(Bytes(), [0x61])
    assert [decoder.add(256), decoder.add(0x62), decoder.add(256)] == ["", "b", ""]


def test_a_word_behind_the_prompt_gets_its_space() -> None:
    decoder = Detokenizer(Words(), [0])
    assert [decoder.add(1), decoder.add(2)] == [" it", " goes"]
    assert Detokenizer(Words(), []).add(1) == "it"


def test_a_word_behind_many_tokens_without_text_gets_its_space() -> None:
    decoder = Detokenizer(Words(), [0])
    assert {decoder.add(4) for _ in range(100)} == {""}
    assert [decoder.add(1), decoder.add(2)] == [" it", " goes"]


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_output_ends_before_the_first_stop_text_however_it_comes_in_pieces(text, stops, data) -> None:
    texts = StopTexts(stops)
    given_out, stopped, start = "", None, 0
    while start < len(text) and stopped is None:
        stop = data.draw(st.integers(start + 1, len(text)))
        piece, stopped = texts.add(text[start:stop])
        given_out += piece
        start = stop
    if stopped is None:
        given_out += texts.end()
    seen = text[:start]
    places = [seen.find(each) for each in stops if each in seen]
    assert given_out == (seen[: min(places)] if places else seen)
    assert (stopped is not None) == bool(places)
    if stopped is not None:
        assert seen[len(given_out) :].startswith(stopped)


def test_only_what_may_begin_a_stop_text_is_held_back() -> None:
    texts = StopTexts(["</end>"])
    assert texts.add("x <") == ("x ", None)
    assert texts.add("/e") == ("", None)
    assert texts.add("asy>") == ("</easy>", None)
    assert texts.add("y</end> z") == ("y", "</end>")


def test_no_choice_of_stop_texts_makes_long_work_of_a_token() -> None:
    """Half a million characters, all of them held back: a look at each beginning of each stop text would take hours."""
    texts = StopTexts(["x" * 500_000 + "z", "x" * 250_000 + "y", ("x" * 1_000 + "w") * 200])
    assert {texts.add("x" * 16) for _ in range(31_250)} == {("", None)}
    assert texts.add("x") == ("x", None)
    assert texts.add("z") == ("", "x" * 500_000 + "z")

"""One token as clients are shown it: texts add up to the whole, and bytes are the token's own."""

import pytest

pytest.importorskip("torch", reason="live serving needs torch")
pytest.importorskip("transformers", reason="these tokenizers are those of transformers")

from kvledger.backends.serving.engine.request import TokenDelta
from kvledger.backends.serving.http.responses import CompletionShape, Piece
from kvledger.backends.serving.sampling.detokenizer import TokenSpeller, TokenSpelling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer_of(names, decoder):
    plain = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=[]))
    plain.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=plain)


@pytest.fixture
def byte_level():
    """One token a byte, in the order of their characters, and some of several."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġhello", "âĤ", "¬x"]
    return tokenizer_of(names, decoders.ByteLevel())


@pytest.fixture
def byte_fallback():
    """As of SentencePiece: words begin with a mark, and bytes have names."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return tokenizer_of(["▁hello", "lo", "<0xE2>", "<0x0A>", "▁"], decoders.Sequence(steps))


def spellings(tokenizer, *names):
    spell = TokenSpeller(tokenizer)
    return [spell(tokenizer.convert_tokens_to_ids(name)) for name in names]


def test_bytes_of_a_byte_level_vocabulary_add_up_to_the_text(byte_level) -> None:
    found = spellings(byte_level, "Ġhello", "âĤ", "¬x")
    assert [each.text for each in found] == [" hello", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}x"]
    assert [each.utf8 for each in found] == [b" hello", b"\xe2\x82", b"\xacx"]
    assert b"".join(each.utf8 for each in found).decode() == " hello€x"


def test_every_byte_of_a_byte_level_vocabulary_is_told(byte_level) -> None:
    spell = TokenSpeller(byte_level)
    assert sorted(spell(token_id).utf8 for token_id in range(256)) == [bytes([byte]) for byte in range(256)]


def test_a_token_keeps_the_space_that_it_begins_with(byte_fallback) -> None:
    found = spellings(byte_fallback, "▁hello", "lo", "▁")
    assert [each.text for each in found] == [" hello", "lo", " "]
    assert [each.utf8 for each in found] == [b" hello", b"lo", b" "]


def test_named_bytes_are_bytes(byte_fallback) -> None:
    assert spellings(byte_fallback, "<0xE2>", "<0x0A>") == [
        TokenSpelling("\N{REPLACEMENT CHARACTER}", b"\xe2"),
        TokenSpelling("\n", b"\n"),
    ]


def test_bytes_that_a_tokenizer_does_not_tell_are_not_made_up() -> None:
    unknown = tokenizer_of(["\N{REPLACEMENT CHARACTER}", "漢"], decoders.Fuse())
    assert TokenSpeller(unknown)(0) == TokenSpelling("\N{REPLACEMENT CHARACTER}", None)


def test_tokens_that_read_alike_stay_apart_in_a_completions_logprobs(byte_level) -> None:
    lead, other = (byte_level.convert_tokens_to_ids(name) for name in ("âĤ", "â"))
    delta = TokenDelta(lead, "", logprob=-0.5, top_logprobs=((lead, -0.5), (other, -1.5)))
    choice = CompletionShape(TokenSpeller(byte_level)).choice(0, Piece("", (delta,)))
    assert choice["logprobs"]["tokens"] == [r"bytes:\xe2\x82"]
    assert choice["logprobs"]["top_logprobs"] == [{r"bytes:\xe2\x82": -0.5, r"bytes:\xe2": -1.5}]

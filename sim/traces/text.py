"""Count tokens in text, by a tokenizer or by an estimate, and name the blocks of prompts that are text."""

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from ...core.errors import InputError
from .rows import MAX_HASH_ID

CHARACTERS_PER_TOKEN = re.compile(r"chars:([1-9]\d{0,2})")
HOW_TO_NAME_ONE = (
    "name one with --tokenizer: the path of a Hugging Face tokenizer.json (or of the folder that holds it), or "
    "chars:4 for an estimate of one token every 4 characters"
)


@attrs.frozen
class Tokenizer:
    """Splits text into tokens, without special tokens around it. Equal tokens mean equal content."""

    name: str  # in the report
    encode: Callable[[str], Sequence[int] | Sequence[str]]


def open_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by the path of its file or folder, or the estimate `chars:N`; raises `InputError` otherwise.

    The estimate counts every N characters as a token: the right order of magnitude for English. A tokenizer.json is
    read by the package `tokenizers`; no chat template is added.
    """
    estimate = CHARACTERS_PER_TOKEN.fullmatch(name)
    if estimate:
        size = int(estimate.group(1))
        note = f"an estimate: one token every {size} characters"
        return Tokenizer(note, lambda text: [text[i : i + size] for i in range(0, len(text), size)])
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"--tokenizer is {name!r}, and there is no file {path}; {HOW_TO_NAME_ONE}")
    try:
        from tokenizers import Tokenizer as FastTokenizer  # pyright: ignore[reportMissingImports] - optional
    except ImportError:
        raise InputError(
            f"--tokenizer {path}: reading it takes the package `tokenizers`, which is not installed; install it "
            "(pip install tokenizers), or ask for an estimate with --tokenizer chars:4"
        ) from None
    try:
        fast = FastTokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for every fault of the file
        raise InputError(f"--tokenizer {path}: is not a Hugging Face tokenizer.json: {error}") from error
    return Tokenizer(str(path), lambda text: fast.encode(text, add_special_tokens=False).ids)


class TextBlocks:
    """The tokens of a growing text and the ids of its blocks: a chain of digests, so that equal prefixes match.

    An id depends on the tokens of its block, all tokens before them, and the salt (like a cache salt, it enters the
    first block and the chain carries it; field report B03). The last block may be partial; its id then stands for
    exactly these tokens, as in Mooncake's traces.
    """

    def __init__(self, block_size: int, salt: str | None = None) -> None:
        self._block_size = block_size
        self._chain = hashlib.blake2b(repr(salt).encode(), digest_size=16).digest()
        self._full_ids: list[int] = []
        self._tail: list[int | str] = []

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._full_ids) * self._block_size + len(self._tail)

    def extend(self, tokens: Sequence[int] | Sequence[str]) -> None:
        """Append tokens; each block that becomes full gets its final id."""
        self._tail.extend(tokens)
        num_full = len(self._tail) // self._block_size * self._block_size
        for start in range(0, num_full, self._block_size):
            self._chain = self._digest(self._tail[start : start + self._block_size])
            self._full_ids.append(_id_of(self._chain))
        del self._tail[:num_full]

    def ids(self) -> tuple[int, ...]:
        """An id for every block, `ceil(num_tokens / block_size)` of them."""
        if not self._tail:
            return tuple(self._full_ids)
        return (*self._full_ids, _id_of(self._digest(self._tail)))

    def _digest(self, tokens: list[int | str]) -> bytes:
        return hashlib.blake2b(self._chain + repr(tokens).encode(), digest_size=16).digest()


def _id_of(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") & MAX_HASH_ID

"""Counting tokens in text: by the tokenizer that the user names, or by a stated estimate where one is asked for."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import attrs

from ...core.errors import InputError

CHARACTERS_PER_TOKEN = re.compile(r"chars:([1-9]\d{0,2})")
HOW_TO_NAME_ONE = (
    "name one with --tokenizer: the path of a Hugging Face tokenizer.json (or of the folder that holds it), or "
    "chars:4 for an estimate of one token every 4 characters"
)


class Tokenizer(Protocol):
    """Splits text into tokens. Equal tokens are equal content; what they are does not matter here."""

    @property
    def name(self) -> str:
        """What the report calls it."""
        ...

    def encode(self, text: str) -> Sequence[int] | Sequence[str]:
        """The tokens of a text, without any that the tokenizer would add around it."""
        ...


@attrs.frozen
class CharacterEstimate:
    """Every `characters` characters are a token: no tokenizer at all, but the right order of magnitude for English."""

    characters: int

    @property
    def name(self) -> str:
        """Says that it is an estimate."""
        return f"an estimate: one token every {self.characters} characters"

    def encode(self, text: str) -> Sequence[str]:
        """Pieces of the text; the last one may be shorter."""
        return [text[i : i + self.characters] for i in range(0, len(text), self.characters)]


class HuggingFaceTokenizer:
    """A tokenizer.json, read by the `tokenizers` package."""

    def __init__(self, path: Path) -> None:
        """Load it. Raises `InputError` where the package is missing or the file is no tokenizer."""
        try:
            from tokenizers import Tokenizer as FastTokenizer  # pyright: ignore[reportMissingImports] - optional
        except ImportError:
            raise InputError(
                f"--tokenizer {path}: reading it takes the package `tokenizers`, which is not installed; install it "
                "(pip install tokenizers), or ask for an estimate with --tokenizer chars:4"
            ) from None
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for whatever is wrong with the file
            raise InputError(f"--tokenizer {path}: is not a Hugging Face tokenizer.json: {error}") from error
        self.name = str(path)

    def encode(self, text: str) -> Sequence[int]:
        """Token ids; no special tokens and no chat template are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def open_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by the path of its file or folder, or the estimate `chars:N`; `InputError` for anything else."""
    estimate = CHARACTERS_PER_TOKEN.fullmatch(name)
    if estimate:
        return CharacterEstimate(int(estimate.group(1)))
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"--tokenizer is {name!r}, and there is no file {path}; {HOW_TO_NAME_ONE}")
    return HuggingFaceTokenizer(path)

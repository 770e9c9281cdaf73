"""Keeps results in files named after their inputs, so that an interrupted search or sweep goes on where it stopped."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ..figures import Document


def digest(*inputs: Any) -> str:
    """A name for plain values."""
    text = json.dumps(inputs, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def content_of(files: Iterable[str]) -> str:
    """A digest of the files, and of those in folders. Raises InputError for a file that cannot be read."""
    found = hashlib.sha256()
    paths = [Path(name) for name in files]
    inside = [sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path] for path in paths]
    for name in (path for files in inside for path in files):
        try:
            with open(name, "rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise InputError(f"{name}: {error.strerror or error}") from None
    return found.hexdigest()


def files_among(values: Iterable[Any]) -> list[str]:
    """The values that name an existing file or folder, such as a model's configuration or a fitted trace, each once."""
    return list(dict.fromkeys(value for value in values if isinstance(value, str) and Path(value).exists()))


def kept(folder: str | Path | None, name: str, run: Callable[[], Document], required: Iterable[str] = ()) -> Document:
    """The document kept in the folder under this name, or the result of `run`, which is then kept atomically.

    Without a folder, nothing is kept.

    Raises InputError: the folder cannot be written, or the kept file is no document with the `required` keys.
    """
    if folder is None:
        return run()
    path = Path(folder) / f"{name}.json"
    if path.is_file():
        try:
            document: Document = json.loads(path.read_text(encoding="utf-8"))
            _ = [document[key] for key in required]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is not a kept run ({error}); delete it to run it again") from None
        return document
    document = run()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        unfinished.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise InputError(f"--keep {folder}: {error.strerror or error}; give a folder to write to") from None
    return document

"""Every format that can be read, in the order in which a file's content is compared with them."""

from collections.abc import Sequence
from pathlib import Path

from ...core.errors import InputError
from .format import TraceFormat
from .formats.agentic import AGENTIC
from .formats.azure import AZURE
from .formats.burstgpt import BURSTGPT
from .formats.mooncake import MOONCAKE
from .formats.qwen_bailian import QWEN_BAILIAN
from .formats.request_log import REQUEST_LOG
from .formats.sharegpt import SHAREGPT
from .formats.vidur import VIDUR
from .lines import first_lines

# Headers first, then the formats with fields of their own; Mooncake's fields occur in others too, so it is asked last.
FORMATS: dict[str, TraceFormat] = {
    each.name: each for each in (AZURE, BURSTGPT, VIDUR, QWEN_BAILIAN, AGENTIC, SHAREGPT, REQUEST_LOG, MOONCAKE)
}
# The first rows may be the bad ones, so the format is looked for in more than one.
LINES_TO_DETECT = 20
BYTES_TO_DETECT = 1 << 16


def recognise(path: Path, name: str | None) -> tuple[TraceFormat, list[bytes]]:
    """The format named, or the one that the content shows, and the first lines. Raises `InputError` where none fits."""
    if name is not None and name not in FORMATS:
        raise InputError(f"--format is {name!r}; the formats are {', '.join(FORMATS)}")
    numbered = first_lines(path, LINES_TO_DETECT, BYTES_TO_DETECT)
    if not numbered:
        raise InputError(f"{path}: the file is empty; a trace holds one request a line")
    place, first_line = numbered[0]
    lines = [line for _, line in numbered]
    shown_line = first_line[:80].decode("utf-8", "replace")
    if name is not None:
        wanted = FORMATS[name]
        if wanted.needs_header and not wanted.matches(lines):
            raise InputError(
                f"{path}:{place}: is not the header of {wanted.title} ({wanted.first_line}); it reads {shown_line!r}"
            )
        return wanted, lines
    for each in FORMATS.values():
        if each.matches(lines):
            return each, lines
    known = "; ".join(f"{each.name}: {each.first_line}" for each in FORMATS.values())
    raise InputError(f"{path}:{place}: no known trace format holds a line such as {shown_line!r}. Known lines: {known}")


def files_of(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The trace files among `paths`, folders replaced by the .json and .jsonl files in them, and what was left out.

    Raises `InputError` for a folder without such files.
    """
    files: list[Path] = []
    left_out: list[str] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(each for each in path.iterdir() if not each.name.startswith("."))
        chosen = [each for each in found if each.is_file() and {".json", ".jsonl"} & set(each.suffixes)]
        if not chosen:
            raise InputError(f"{path}: Is a directory, and no .json or .jsonl file (plain or .gz) is in it")
        files.extend(chosen)
        left_out.extend(str(each) for each in found if each not in chosen)
    return files, left_out

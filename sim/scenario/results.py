"""What results have in common: rows as data frames, and the trace they are about."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from ...core.errors import InputError
from ..figures import Document
from ..traces.trace import TraceInfo


@attrs.frozen(repr=False)
class Table:
    """Rows under named columns.

    Attributes:
        columns: name -> values, all of one length.
    """

    columns: Mapping[str, Sequence[Any]]

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> "Table":
        """One column for each key of the first row."""
        return cls({name: [row[name] for row in rows] for name in (rows[0] if rows else ())})

    def __len__(self) -> int:
        """How many rows."""
        return len(next(iter(self.columns.values()), ()))

    def __iter__(self) -> Iterator[Document]:
        """Iterate over the rows as dicts."""
        for values in zip(*self.columns.values(), strict=True):
            yield dict(zip(self.columns, values, strict=True))

    def __repr__(self) -> str:
        """Size and column names."""
        return f"<Table of {len(self):,} rows: {', '.join(self.columns)}>"

    def to_frame(self) -> Any:
        """A pandas data frame, or a polars one where only polars is installed.

        Raises InputError: neither is installed.
        """
        columns = {name: list(values) for name, values in self.columns.items()}
        for library in ("pandas", "polars"):
            try:
                return __import__(library).DataFrame(columns)
            except ModuleNotFoundError:
                continue
        raise InputError("data frames need pandas or polars: pip install pandas")


def trace_as_dict(info: TraceInfo) -> Document:
    """What was replayed, for JSON: name, units, window, and what was left out."""
    of_trace = ("name", "format", "timestamp_unit", "trace_block_size", "trace_block_size_source", "full_blocks_only")
    of_window = ("skip_first", "limit", "first_place", "last_place", "start_s", "end_s")
    return {
        **{name: getattr(info, name) for name in (*of_trace, "tokenizer", "rate_scale")},
        "window": {name: getattr(info.window, name) for name in of_window},
        **{name: getattr(info, name) for name in ("num_requests", "input_tokens", "output_tokens", "claims_reuse")},
        "rows_skipped": {reason: rows.num_rows for reason, rows in info.rows_skipped.items()},
        "notes": info.notes(),
    }

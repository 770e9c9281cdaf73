"""Python columns as Arrow arrays, buffer by buffer: for a batch of a few rows a tenth of what `pa.array` takes."""

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa


def number_array(entries: pa.DataType, values: "array[int]") -> pa.Array:
    """Numbers of which none is missing; copies them."""
    return pa.Array.from_buffers(entries, len(values), [None, pa.py_buffer(values.tobytes())])


def optional_number_array(entries: pa.DataType, typecode: str, values: Sequence[float | None]) -> pa.Array:
    """Numbers of which some may be None."""
    if values.count(None) == len(values):
        return pa.nulls(len(values), entries)
    data = array(typecode, [0 if value is None else value for value in values])
    return pa.Array.from_buffers(entries, len(values), [_validity(values), pa.py_buffer(data.tobytes())])


def binary_array(entries: pa.DataType, values: Sequence[bytes | None]) -> pa.Array:
    """Byte strings (or texts in UTF-8) of which some may be None.

    Raises:
        OverflowError: they have more than 2 GiB together.
    """
    if values.count(None) == len(values):
        return pa.nulls(len(values), entries)
    ends = array("i", accumulate([0 if value is None else len(value) for value in values], initial=0))
    data = b"".join([value for value in values if value is not None])
    return pa.Array.from_buffers(
        entries, len(values), [_validity(values), pa.py_buffer(ends.tobytes()), pa.py_buffer(data)]
    )


def list_array(entries: pa.DataType, ends: "array[int]", flat: pa.Array) -> pa.Array:
    """Lists of `entries`; list i is `flat[ends[i]:ends[i + 1]]`."""
    buffers = [None, pa.py_buffer(ends.tobytes())]
    return pa.Array.from_buffers(pa.list_(entries), len(ends) - 1, buffers, children=[flat])


def _validity(values: Sequence[object]) -> pa.Buffer | None:
    """One bit a value, in Arrow's order; None where all are there."""
    if None not in values:
        return None
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    return pa.py_buffer(np.packbits(present, bitorder="little").tobytes())

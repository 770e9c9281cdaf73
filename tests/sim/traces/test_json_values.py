"""JSON out of files of any layout, in pieces of any size: the same values on the same lines."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.sim.traces.lines import read_json_values
from kvledger.sim.traces.rows import BadRow

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("json") / "values.json"


@given(st.lists(st.dictionaries(TEXT, JSON, max_size=3), min_size=1), st.integers(1, 40))
def test_objects_come_back_in_any_layout_and_pieces(path, values, chunk_bytes):
    for text in (
        "\n".join(json.dumps(value) for value in values),
        "\n\n".join(json.dumps(value, indent=2) for value in values),
        json.dumps(values),
        json.dumps(values, indent=1, ensure_ascii=False),
    ):
        path.write_bytes(text.encode())
        assert [value for _, value in read_json_values(path, chunk_bytes)] == values


def test_values_know_the_line_on_which_they_begin(path):
    path.write_text('\n{"a": [1,\n2]}\n\n  {"b": 2}')
    assert list(read_json_values(path, 3)) == [(2, {"a": [1, 2]}), (5, {"b": 2})]
    path.write_text('[\n {"a": 1},\n\n {"b": 2}]\n')
    assert list(read_json_values(path, 3)) == [(2, {"a": 1}), (4, {"b": 2})]


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 16])
def test_a_broken_line_is_reported_and_the_next_one_is_read(path, chunk_bytes):
    path.write_text('{"a": 1}\n{"b": \n{"c": 3}\nnonsense\n{"d": "x\n{"e": 5}\n{"f": ')
    read = list(read_json_values(path, chunk_bytes))
    assert [line for line, value in read if not isinstance(value, BadRow)] == [1, 3, 6]
    assert [(line, value.reason) for line, value in read if isinstance(value, BadRow)] == [
        (2, "not_json"),
        (4, "not_json"),
        (5, "not_json"),
        (7, "not_json"),
    ]


def test_nesting_without_end_is_a_bad_value(path):
    path.write_text('{"a": ' + "[" * 200_000 + "\n" + '{"b": 1}')
    first, second = read_json_values(path)
    assert isinstance(first[1], BadRow)
    assert second == (2, {"b": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1}, {"b": ', "values.json:1: the array is broken here"),
        ('[{"a": 1} {"b": 2}]', "'{' instead of a comma or ]"),
        ('[{"a": 1}]\n{"b": 2}', "values.json:2: .*there is text after the end of the array"),
        ('[{"a": 1},\n', "the array is broken here"),
    ],
)
def test_a_broken_array_is_an_error_with_its_line(path, text, message):
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        list(read_json_values(path, 4))


def test_a_cut_off_gzip_is_an_error(path):
    packed = gzip.compress(b"\n".join(b'{"a": %d}' % i for i in range(20_000)))
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match="damaged or cut off"):
        list(read_json_values(path))


def test_an_empty_array_holds_nothing(path):
    path.write_text(" [ ] ")
    assert list(read_json_values(path)) == []

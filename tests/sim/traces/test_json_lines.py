"""JSON lines: whatever a line looks like, it is read as Python's own `json` reads it, and refused in the same words."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.sim.traces import TraceInfo, Window, trace_formats
from kvledger.sim.traces import lines as trace_lines
from kvledger.sim.traces.format import TraceSource

NAMES = {
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
    "qwen-bailian": ("timestamp", "input_length", "output_length", "hash_ids", "chat_id", "parent_chat_id", "turn"),
    "log": ("arrival_s", "input_tokens", "output_tokens", "hash_ids", "session", "priority", "think_time_s"),
}
HUGE = [str(n) for n in (2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**25, 10**308, 10**309)]
ODD = [
    *("0", "-0", "-0.0", "1.0", "1e2", "1E+2", "2.5", "1e19", "1e400", "-1e400", "1e-400", "01", "1.", ".5", "+1"),
    *("NaN", "Infinity", "-Infinity", "true", "false", "null", "nul", "'1'", "{}", "[]", "[1,]", "{,}", ""),
    *(
        '"1"',
        '"\\ud800"',
        '"\\u0000"',
        '"\\x"',
        '"\t"',
        '"\x7f"',
        '"é"',
        "[" * 900 + "]" * 900,
        "[" * 5000 + "]" * 5000,
    ),
]
NUMBERS = st.integers(0, 100).map(str) | st.sampled_from(["1", "-1", *HUGE, "1" + "0" * 5_000])
VALUES = NUMBERS | st.sampled_from(ODD) | st.floats().map(json.dumps)
LISTS = st.lists(NUMBERS | VALUES, max_size=4).map(lambda values: f"[{', '.join(values)}]")


@st.composite
def lines(draw, names: tuple[str, ...]) -> bytes:
    """An object with these fields, most of them as they should be; some are odd, missing, twice there or others."""
    good = {name: LISTS if name == "hash_ids" else NUMBERS for name in names}
    fields = [(name, draw(good[name] | VALUES)) for name in names if draw(st.integers(0, 9))]
    if not draw(st.integers(0, 4)):
        fields.append((draw(st.sampled_from([*names, "other", "\\u0074urn", "é"])), draw(VALUES | LISTS)))
    text = "{" + ", ".join(f'"{name}": {value}' for name, value in fields) + "}"
    line = text.encode()
    if not draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(line)))
        line = (
            line[:at]
            + draw(st.sampled_from([b"\xff", b"\xef\xbb\xbf", b"\x00", b"\x0b", b"\r", b" ", b",", b"}"]))
            + line[at:]
        )
    return line


def read(path, format_name: str) -> tuple[str, set[str]]:
    """What a format's reader makes of a file, to the last sign, and the fields that it has not used."""
    info = TraceInfo("lines", str(path), format_name, "s", 16, "given", 1.0, Window(0, None))
    rows = trace_formats.get(format_name)(format_name).read_rows(TraceSource((path,), info, 1_000, "s"))
    return "\n".join(map(repr, rows)), info.unused_fields


def refuse(line: bytes) -> None:
    """A decoder that can read nothing, so that every line is left to the other one."""
    raise orjson.JSONDecodeError("refused", line.decode("utf-8", "replace"), 0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("lines") / "trace.jsonl"


@pytest.mark.parametrize("format_name", NAMES)
@given(data=st.data())
def test_lines_are_read_and_refused_as_by_python_s_own_decoder(path, format_name, data):
    path.write_bytes(b"\n".join(data.draw(st.lists(lines(NAMES[format_name]), min_size=1, max_size=6))))
    fast = read(path, format_name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_lines.orjson, "loads", refuse)
        assert fast == read(path, format_name)


@pytest.mark.parametrize("field", NAMES["mooncake"])
def test_a_value_nested_deeper_than_python_can_follow_is_refused(path, field):
    row = {**dict.fromkeys(NAMES["mooncake"], 1), "hash_ids": [1], field: "deep"}
    path.write_text(json.dumps(row).replace('"deep"', "[" * 1_000 + "]" * 1_000))
    rows, _ = read(path, "mooncake")
    assert rows.startswith("BadRow(place=1, field=None, reason='not_json', message='is not JSON (maximum recursion")

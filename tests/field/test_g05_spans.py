"""Field report G05: OpenTelemetry spans with token counts are requests."""

import json

import pytest
from kvledger.core.errors import InputError
from kvledger.sim import open_trace

START = 1_718_000_000_000_000_000
SECOND = 1_000_000_000


def span(name, start_s=0.0, seconds=2.0, tokens=(812, 44), parent=None, **attributes):
    """A span of trace a1; `tokens` None: a span of something else."""
    counts = {} if tokens is None else dict(zip(("input_tokens", "output_tokens"), tokens, strict=True))
    values = [{"key": f"gen_ai.usage.{key}", "value": {"intValue": str(count)}} for key, count in counts.items()]
    values += [{"key": key.replace("__", "."), "value": {"stringValue": text}} for key, text in attributes.items()]
    start = START + int(start_s * SECOND)
    times = {"startTimeUnixNano": str(start), "endTimeUnixNano": str(start + int(seconds * SECOND))}
    above = {} if parent is None else {"parentSpanId": parent}
    return {"traceId": "a1", "spanId": name, "name": "chat", **above, **times, "attributes": values}


def document(*spans):
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def trace_file(tmp_path, *documents, indent=None):
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(json.dumps(each, indent=indent) + "\n" for each in documents))
    return path


def read(path, **options):
    trace = open_trace(path, **options)
    return list(trace), trace.info


@pytest.mark.parametrize("indent", [None, 2])
def test_g05_one_span_is_one_request_of_its_tokens_and_seconds(tmp_path, indent):
    (request,), info = read(trace_file(tmp_path, document(span("b1")), indent=indent))
    assert info.format == "otel-spans"
    assert (request.input_length, request.output_length, request.turn.answered_s) == (812, 44, 2.0)
    assert (request.arrival_s, request.hash_ids) == (0, None)


def test_g05_on_the_command_line(kvledger, tmp_path):
    path = trace_file(tmp_path, document(span("b1")))
    code, out, err = kvledger("replay", path, "--num-gpu-blocks-override", 4000, "--json")
    assert (code, err) == (0, "")
    trace = json.loads(out)["trace"]
    assert [trace[name] for name in ("format", "num_requests", "input_tokens", "output_tokens")] == [
        "otel-spans",
        1,
        812,
        44,
    ]


def test_g05_spans_are_exported_when_they_end_and_sorted_by_start(tmp_path):
    late, early = span("b1", start_s=5, tokens=(10, 1)), span("b2", start_s=1.5, seconds=9, tokens=(20, 2))
    requests, _ = read(trace_file(tmp_path, document(late), document(early)))
    assert [(each.arrival_s, each.input_length, each.place) for each in requests] == [(0, 20, 1), (3.5, 10, 2)]


@pytest.mark.parametrize("between", [0, 1, 2])
def test_g05_tokens_that_spans_below_count_again_are_counted_once(tmp_path, between):
    names = ["agent", *(f"tool{index}" for index in range(between)), "call"]
    spans = [span("agent", tokens=(900, 50), seconds=9)]
    spans += [span(name, tokens=None, parent=names[index]) for index, name in enumerate(names[1:-1])]
    spans += [span("call", parent=names[-2]), span("second", start_s=4, parent="agent")]
    requests, info = read(trace_file(tmp_path, document(*spans)))
    assert [each.input_length for each in requests] == [812, 812]
    assert "1 spans carry the token counts of spans below them and were left out" in info.notes()
    assert between == 0 or f"{between} spans carry no token counts and are no requests" in info.notes()


def test_g05_a_span_that_was_exported_twice_counts_once(tmp_path):
    requests, info = read(trace_file(tmp_path, document(span("b1")), document(span("b1"), span("b2", start_s=1))))
    assert len(requests) == 2
    assert "1 spans were exported twice and count once" in info.notes()


def test_g05_conversations_are_sessions_with_think_times(tmp_path):
    talk = {"gen_ai__conversation__id": "c"}
    spans = [span("b1", **talk), span("b2", start_s=5, **talk), span("b3", start_s=1)]
    requests, info = read(trace_file(tmp_path, document(*spans)))
    assert info.links_turns and info.records_think_times
    first, alone, second = requests
    assert (second.turn.session, second.turn.number, second.turn.waits_for) == ("c", 2, (first.place,))
    assert second.turn.think_s == 3.0  # 5 s after the first began, which took 2 s
    assert alone.turn.waits_for == ()


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"), {"intValue": "7"}),
        (("llm.token_count.prompt", "llm.token_count.completion"), {"intValue": 7}),
        (("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"), {"doubleValue": 7.0}),
    ],
)
def test_g05_older_names_and_both_spellings_of_integers_are_read(tmp_path, names, value):
    one = {**span("b1", tokens=None), "attributes": [{"key": name, "value": value} for name in names]}
    ((request,), _) = read(trace_file(tmp_path, document(one)))
    assert (request.input_length, request.output_length) == (7, 7)


BAD = {
    "no end": (
        {key: value for key, value in span("b1").items() if key != "endTimeUnixNano"},
        "endTimeUnixNano' is missing",
    ),
    "no output": ({**span("b1"), "attributes": span("b1")["attributes"][:1]}, "output_tokens' is missing"),
    "ends first": (span("b1", seconds=-1), "earlier than the start"),
    "no prompt": (span("b1", tokens=(0, 4)), "input_tokens' is 0"),
    "no number": ({**span("b1"), "startTimeUnixNano": "soon"}, "startTimeUnixNano' 'soon' is not a number"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD.keys())
def test_g05_a_bad_span_is_named_and_can_be_skipped(tmp_path, bad, message):
    path = trace_file(tmp_path, document(bad, span("b2")))
    with pytest.raises(InputError, match=message) as refusal:
        read(path)
    assert f"{path}:1: span 'b1'" in str(refusal.value)
    requests, info = read(path, on_bad_row="skip")
    assert (len(requests), info.num_rows_skipped) == (1, 1)


def test_g05_several_files_make_one_trace(tmp_path):
    child, parent = tmp_path / "server.json", tmp_path / "client.json"
    child.write_text(json.dumps(document(span("b2", start_s=1, parent="b1"))))
    parent.write_text(json.dumps(document(span("b1"), span("b3", start_s=4))))
    requests, _ = read([parent, child])
    assert [each.arrival_s for each in requests] == [0, 3]  # the client's span counts its server's tokens again

"""Traces that hold text: tokens by the tokenizer that the user names, blocks by their content, and never a guess."""

import json
import sys
import tracemalloc
from pathlib import Path

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.cache.lru_curve import lru_curve
from kvledger.sim.cache.prompt_blocks import read_prompt_blocks
from kvledger.sim.traces import open_trace
from kvledger.sim.traces.text import TextBlocks, open_tokenizer

SYSTEM = "You are a helpful assistant who answers in full sentences and never in verse. "


def conversation(*messages: tuple[str, str], name: str = "a") -> dict:
    return {"id": name, "conversations": [{"from": who, "value": text} for who, text in messages]}


def exchange(question: str, answer: str, name: str = "a") -> dict:
    return conversation(("human", question), ("gpt", answer), name=name)


def write(path: Path, *conversations: dict | str, indent: int | None = None) -> Path:
    path.write_text(json.dumps(conversations, indent=indent))
    return path


def open_sharegpt(tmp_path: Path, *conversations: dict, **options):
    return open_trace(write(tmp_path / "s.json", *conversations), tokenizer="chars:4", **options)


def test_sharegpt_without_a_tokenizer_is_refused_with_the_ways_out(tmp_path):
    path = write(tmp_path / "s.json", exchange("How are you?", "Fine."))
    with pytest.raises(InputError) as refusal:
        open_trace(path)
    assert str(refusal.value) == (
        f"{path}: ShareGPT JSON holds text and no token counts; name one with --tokenizer: the path of a Hugging Face "
        "tokenizer.json (or of the folder that holds it), or chars:4 for an estimate of one token every 4 characters"
    )


def test_an_estimate_counts_characters_only_when_asked_for_and_is_named_as_one(tmp_path):
    trace = open_sharegpt(tmp_path, exchange("How are you?", "Fine."))
    (request,) = trace
    assert (request.input_length, request.output_length) == (3, 2)
    assert trace.info.tokenizer == "an estimate: one token every 4 characters"
    assert "tokens counted by an estimate: one token every 4 characters" in trace.info.notes()


def test_every_answer_is_a_request_whose_prompt_is_all_that_came_before(tmp_path):
    messages = (("system", "x" * 40), ("human", "y" * 40), ("gpt", "z" * 80), ("human", "w" * 40), ("gpt", "v" * 20))
    first, second = open_sharegpt(tmp_path, conversation(*messages))
    assert (first.input_length, first.output_length) == (20, 20)
    assert (second.input_length, second.output_length) == (50, 5)
    assert (second.turn.waits_for, second.turn.think_s) == ((first.place,), 0.0)
    assert (first.turn.is_last, second.turn.is_last) == (False, True)
    assert second.hash_ids[:1] == first.hash_ids[:1], "the first full block of 16 tokens"
    assert len(second.hash_ids) == 4


def test_conversations_share_the_blocks_that_their_texts_share(tmp_path):
    texts = (SYSTEM + "What is a cache?", SYSTEM + "What is a block?", "What is a cache?")
    trace = open_sharegpt(tmp_path, *(exchange(text, "A store.") for text in texts), trace_block_size=4)
    shared = len(SYSTEM + "What is a ") // 4 // 4
    assert lru_curve(read_prompt_blocks(trace)).infinite.hit_blocks == shared
    assert (trace.info.trace_block_size, trace.info.trace_block_size_source) == (4, "given")


def test_conversations_begin_together_or_at_a_rate(tmp_path):
    conversations = [exchange("How are you?", "Fine.", str(i)) for i in range(300)]
    trace = open_sharegpt(tmp_path, *conversations)
    assert {request.arrival_s for request in trace} == {0.0}
    assert "the file records no times: conversations begin together at 0 s" in trace.info.arrivals
    trace = open_sharegpt(tmp_path, *conversations, request_rate=4.0, seed=1)
    arrivals = [request.arrival_s for request in trace]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) / arrivals[-1] == pytest.approx(4.0, rel=0.2)
    assert arrivals == [request.arrival_s for request in trace]


def test_what_has_no_answered_prompt_is_left_out_and_counted(tmp_path):
    trace = open_sharegpt(
        tmp_path,
        conversation(("gpt", "hello, I begin")),
        conversation(("human", "nobody answers")),
        conversation(),
        conversation(("gpt", "an earlier answer"), ("human", "go on"), ("gpt", "gladly")),
    )
    (request,) = trace
    assert request.input_length == 5 + 2
    assert "3 conversations hold no answered prompt and were left out" in trace.info.notes()


@pytest.mark.parametrize("layout", ["array", "pretty-array", "lines"])
def test_an_array_and_a_conversation_a_line_read_the_same(tmp_path, layout):
    conversations = [exchange("How are you?", "Fine.", str(i)) for i in range(3)]
    path = tmp_path / "s.json"
    if layout == "lines":
        path.write_text("\n".join(json.dumps(each) for each in conversations))
    else:
        write(path, *conversations, indent=2 if layout == "pretty-array" else None)
    trace = open_trace(path, tokenizer="chars:4")
    assert trace.info.format == "sharegpt"
    assert [(request.input_length, request.output_length) for request in trace] == [(3, 2)] * 3


BAD = [
    ("words", "not_json", ""),
    ({"id": "x"}, "missing_field", "conversations"),
    ({"id": "x", "conversations": "hi"}, "not_a_list", "conversations"),
    ({"id": "x", "conversations": ["hi"]}, "not_a_message", "conversations[0]"),
    ({"id": "x", "conversations": [{"from": "human"}]}, "missing_field", "conversations[0].value"),
    ({"id": "x", "conversations": [{"value": "hi"}]}, "missing_field", "conversations[0].from"),
    ({"id": "x", "conversations": [{"from": "human", "value": None}]}, "not_text", "conversations[0].value"),
    ({"id": "x", "conversations": [{"from": "cat", "value": "hi"}]}, "unknown_role", "conversations[0].from"),
]


@pytest.mark.parametrize(("bad", "reason", "field"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_conversation_is_named_by_file_line_and_field(tmp_path, bad, reason, field):
    path = tmp_path / "s.json"
    good = exchange("How are you?", "Fine.")
    path.write_text("[\n" + ",\n".join(json.dumps(each) for each in (good, bad, good)) + "\n]")
    with pytest.raises(InputError) as refusal:
        list(open_trace(path, tokenizer="chars:4"))
    assert str(refusal.value).startswith(f"{path}:3:" + (f" field '{field}'" if field else ""))
    trace = open_trace(path, tokenizer="chars:4", on_bad_row="skip")
    assert len(list(trace)) == 2
    assert {name: rows.num_rows for name, rows in trace.info.rows_skipped.items()} == {reason: 1}


@pytest.mark.parametrize("cut", [0.5, 0.97])
def test_a_cut_off_array_is_an_error_not_a_shorter_trace(tmp_path, cut):
    path = write(tmp_path / "s.json", *(exchange("How are you?", "Fine.") for _ in range(50)), indent=1)
    text = path.read_text()
    path.write_text(text[: int(len(text) * cut)])
    with pytest.raises(InputError, match=r"s\.json:\d+: the array is broken here"):
        list(open_trace(path, tokenizer="chars:4", on_bad_row="skip"))


def test_reading_holds_one_conversation_of_an_array_on_one_line(tmp_path):
    path = write(tmp_path / "s.json", *(exchange("word " * 400, "word " * 400, str(i)) for i in range(1_000)))
    assert path.stat().st_size > 4_000_000
    trace = open_trace(path, tokenizer="chars:4")
    tracemalloc.start()
    try:
        assert sum(1 for _ in trace) == 1_000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_500_000


def log_line(**fields) -> str:
    return json.dumps({"arrival_s": 0.0, "output_tokens": 2, **fields})


def test_a_log_s_text_is_counted_by_the_tokenizer_and_shares_by_content(tmp_path):
    path = tmp_path / "log.jsonl"
    texts = [SYSTEM + "one", SYSTEM + "two", "one"]
    path.write_text("\n".join(log_line(prompt=text, output_tokens=None, output="abcdefgh") for text in texts))
    path.write_text(path.read_text().replace('"output_tokens": null, ', ""))
    trace = open_trace(path, tokenizer="chars:4")
    requests = list(trace)
    assert [request.input_length for request in requests] == [-(-len(text) // 4) for text in texts]
    assert [request.output_length for request in requests] == [2, 2, 2]
    assert requests[0].hash_ids[0] == requests[1].hash_ids[0]
    assert (trace.info.trace_block_size, trace.info.trace_block_size_source) == (16, "chosen for text")


def test_a_salt_keeps_tenants_apart_in_text_and_in_ids(tmp_path):
    path = tmp_path / "log.jsonl"
    salts = ["a", "a", "b", None]
    path.write_text("\n".join(log_line(prompt=SYSTEM, cache_salt=salt) for salt in salts))
    ids = [request.hash_ids for request in open_trace(path, tokenizer="chars:4")]
    assert ids[0] == ids[1]
    assert not set(ids[0]) & (set(ids[2]) | set(ids[3]))
    path.write_text("\n".join(log_line(input_tokens=32, hash_ids=[1, 2], cache_salt=salt) for salt in salts))
    ids = [request.hash_ids for request in open_trace(path, trace_block_size=16)]
    assert ids[0] == ids[1]
    assert not set(ids[0]) & set(ids[2])
    assert ids[3] == (1, 2)


def test_a_log_s_times_may_be_in_any_unit_that_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"timestamp": 1_700_000_000_000 + 250 * i, "input_tokens": 5, "output_tokens": 1} for i in range(3)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    trace = open_trace(path, timestamp_unit="ms")
    assert [request.arrival_s for request in trace] == [0.0, 0.25, 0.5]
    assert trace.info.timestamp_unit == "ms"
    mixed = [{"arrival_s": 1.0}, {"timestamp": 2_500, "unit": "ms"}, {"timestamp": 3_000_000_000, "unit": "ns"}]
    path.write_text("\n".join(json.dumps({**row, "input_tokens": 5, "output_tokens": 1}) for row in mixed))
    assert [request.arrival_s for request in open_trace(path)] == [0.0, 1.5, 2.0]


def test_a_log_s_sessions_think_and_its_priorities_are_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [
        {"arrival_s": 0.0, "session": "x", "duration_s": 2.0, "priority": 5},
        {"arrival_s": 5.0, "session": "x", "duration_s": 1.0},
        {"arrival_s": 9.0, "session": "x", "think_time_s": 2.5},
    ]
    path.write_text("\n".join(json.dumps({**row, "input_tokens": 5, "output_tokens": 1}) for row in rows))
    trace = open_trace(path)
    requests = list(trace)
    assert trace.info.records_think_times
    assert [request.priority for request in requests] == [5, 0, 0]
    assert [request.turn.think_s for request in requests] == [None, 3.0, 2.5]
    assert [request.turn.waits_for for request in requests] == [(), (1,), (2,)]


def test_blocks_of_text_are_a_chain():
    one, other = TextBlocks(2), TextBlocks(2)
    one.extend([1, 2, 3, 4, 5])
    other.extend([9, 2])
    other.extend([3, 4, 5])
    assert one.num_tokens == other.num_tokens == 5
    assert len(one.ids()) == 3
    assert not set(one.ids()) & set(other.ids()), "equal blocks after different prefixes are different"
    partial = one.ids()[2]
    full = one.ids()[:2]
    one.extend([6])
    assert one.ids()[:2] == full
    assert one.ids()[2] != partial
    assert TextBlocks(2, salt="a").ids() == ()


def test_a_tokenizer_that_is_not_there_is_refused_by_its_path(tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        open_tokenizer("meta-llama/Llama-3.1-8B")
    with pytest.raises(InputError, match=r"there is no file .*tokenizer\.json"):
        open_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match="--tokenizer is 'chars:0'"):
        open_tokenizer("chars:0")


def test_a_missing_package_is_named_with_the_ways_out(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"package `tokenizers`, which is not installed; .* --tokenizer chars:4"):
        open_tokenizer(str(tmp_path))


def word_tokenizer(path: Path) -> Path:
    """A tokenizer.json that splits at spaces and knows four words."""
    vocabulary = {"[UNK]": 0, "how": 1, "are": 2, "you": 3, "fine": 4}
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
            }
        )
    )
    return path


def test_a_hugging_face_tokenizer_counts_by_its_file(tmp_path):
    pytest.importorskip("tokenizers", reason="the package `tokenizers` is not installed")
    path = word_tokenizer(tmp_path / "tokenizer.json")
    assert list(open_tokenizer(str(path)).encode("how are you today")) == [1, 2, 3, 0]
    trace = open_trace(write(tmp_path / "s.json", exchange("how are you", "fine fine")), tokenizer=str(tmp_path))
    (request,) = trace
    assert (request.input_length, request.output_length) == (3, 2)
    assert trace.info.tokenizer == str(path)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers", reason="the package `tokenizers` is not installed")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(InputError, match=r"is not a Hugging Face tokenizer\.json"):
        open_tokenizer(str(tmp_path))

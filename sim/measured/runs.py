"""Runs of a real server, request by request: result files of benchmark clients, and what they say of the server.

vLLM bench      one JSON document of `vllm bench serve --save-result --save-detailed`
GuideLLM        its benchmarks.json; the first benchmark
AIPerf          profile_export.jsonl, a record a line
LLMServingSim   *.req.jsonl, a record a line, timed inside the engine; beside it *.meta.json and *.ts.csv
kvledger        the directory of `kvledger serve --log`, or of a vLLM that kvledger recorded
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ...core.errors import InputError
from ..scenario.results import Table
from ..traces.trace import TraceRequest

BLOCK_SIZE = 16  # tokens of a block of `hash_ids`


@attrs.frozen(kw_only=True)
class MeasuredRequest:
    """One request as its client, or its engine, saw it. Times in seconds.

    Attributes:
        name: its id in the file.
        sent_s: when it was sent, from the first request.
        input_len, output_len: tokens.
        ttft_s, e2e_s: from then to the first and to the last token.
        queue_s: from then to its first step; None where the file does not say.
        hash_ids: ids of its prompt's blocks of `BLOCK_SIZE` tokens; None where its tokens are not known.
    """

    name: str
    sent_s: float
    input_len: int
    output_len: int
    ttft_s: float
    e2e_s: float
    queue_s: float | None = None
    hash_ids: tuple[int, ...] | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None for one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else None


@attrs.frozen(kw_only=True)
class MeasuredRun:
    """Requests in the order in which they were sent.

    Attributes:
        requests: those that were answered.
        num_failed: how many were not.
        name, format: of the file.
        in_engine: whether times are the engine's own, without the HTTP server.
        facts: options of a scenario that files beside it state, by field.
        hash_block_size: tokens of a block of `hash_ids`.
        series: columns over time (`time_s`, `running`, `waiting`, `kv_cache_usage`), where there are some.
    """

    requests: Sequence[MeasuredRequest]
    num_failed: int
    name: str
    format: str
    in_engine: bool
    facts: Mapping[str, Any]
    hash_block_size: int = BLOCK_SIZE
    series: Table | None = None

    def traffic(self) -> Iterator[TraceRequest]:
        """The requests as a trace; the place of each is its number from 1."""
        for place, request in enumerate(self.requests, start=1):
            yield TraceRequest(request.sent_s, request.input_len, request.output_len, request.hash_ids, place)


def read_run(path: Path, tokens: Path | None = None) -> MeasuredRun:
    """Read a run; `tokens` is a file with the prompts' token ids, a JSON record a line in the order of the requests.

    Raises InputError: the file cannot be read, is of no known format, or holds no answered request; or the tokens are
    not those of its requests.
    """
    if path.is_dir():
        return _live_run(path)
    text = _text(path)
    first = text.lstrip()[:1]
    try:
        documents = [json.loads(text)] if first == "{" and "\n{" not in text.strip() else _lines(text)
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    for name, (is_it, read) in _FORMATS.items():
        if documents and isinstance(documents[0], dict) and is_it(documents[0]):
            try:
                requests, num_failed = read(documents)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise InputError(f"{path}: read as {name}, but {type(error).__name__}: {error}") from error
            break
    else:
        raise InputError(f"{path}: no run that is known here ({', '.join(_FORMATS)})")
    if not requests:
        raise InputError(f"{path}: none of the {num_failed:,} requests was answered")
    if tokens is not None:
        requests = _with_blocks(requests, tokens)
    start = min(request.sent_s for request in requests)
    requests = [attrs.evolve(request, sent_s=request.sent_s - start) for request in requests]
    facts, series = _beside(path) if name == "LLMServingSim" else ({}, None)
    return MeasuredRun(
        requests=sorted(requests, key=lambda request: request.sent_s),
        num_failed=num_failed,
        name=path.name,
        format=name,
        in_engine=name == "LLMServingSim",
        facts=facts,
        series=series,
    )


def _live_run(path: Path) -> MeasuredRun:
    """The requests of a live engine's log: a token of a request comes at the end of the step that computes it."""
    from ...backends.serving.engine.recording import COMMAND
    from ...backends.sinks.log.rows import LoggedCommit, RequestArrived, RequestEnded, StepComputed
    from ...core.events import RowsAssigned, TokensPlaced, as_ints
    from ..traces.logged import is_live, open_event_log, open_logged_trace

    reader = open_event_log(path)
    if not is_live(reader):
        raise InputError(f"{path}: not the log of a live engine")
    arrived: dict[str, tuple[float, int]] = {}  # seconds of the engine's clock, and tokens of the prompt
    first_ns: dict[str, int] = {}
    last_ns: dict[str, tuple[int, int]] = {}  # the end of the last step, and tokens of the output
    request_in: dict[int, str] = {}
    reached: set[str] = set()  # requests whose whole prompt the running step computes
    offset_ns, now_ns = float("inf"), 0
    for record in reader.records():
        now_ns = record.time_ns or now_ns
        if isinstance(record, LoggedCommit):
            for event in record.commit.events:
                if isinstance(event, RowsAssigned):
                    request_in.update(zip(as_ints(event.rows), event.requests, strict=True))
                elif isinstance(event, TokensPlaced):
                    columns = (as_ints(event.rows), as_ints(event.first_positions), as_ints(event.counts))
                    for row, first, count in zip(*columns, strict=True):
                        request = request_in[row]
                        if request in arrived and first + count >= arrived[request][1]:
                            reached.add(request)
        elif isinstance(record.note, RequestArrived):
            note = record.note
            arrived[note.request_id] = (note.arrival_s, note.num_prompt_tokens)
            offset_ns = min(offset_ns, now_ns - note.arrival_s * 1e9)
        elif isinstance(record.note, StepComputed):
            for request in reached:
                first_ns.setdefault(request, now_ns)
            reached.clear()
        elif isinstance(record.note, RequestEnded) and record.note.reason not in ("abort", "error"):
            last_ns[record.note.request_id] = (now_ns, record.note.num_output_tokens)
    blocks = [row.hash_ids for row in open_logged_trace(path)]
    requests: list[MeasuredRequest] = []
    names = sorted(arrived, key=lambda name: arrived[name][0])
    for name, ids in zip(names, blocks if len(blocks) == len(names) else [None] * len(names), strict=True):
        if name not in last_ns or name not in first_ns:
            continue
        sent_s, num_prompt = arrived[name]
        first_s, last_s = ((each - offset_ns) / 1e9 - sent_s for each in (first_ns[name], last_ns[name][0]))
        requests.append(
            MeasuredRequest(
                name=name, sent_s=sent_s, input_len=num_prompt, output_len=last_ns[name][1],
                ttft_s=first_s, e2e_s=max(first_s, last_s), hash_ids=ids,
            )
        )  # fmt: skip
    if not requests:
        raise InputError(f"{path}: none of the {len(arrived):,} requests was answered")
    start, created, header = requests[0].sent_s, reader.created, reader.manifest.header
    facts: dict[str, Any] = {
        "num_gpu_blocks_override": created.num_blocks,
        "block_size": created.groups[0].block_size,
        "enable_prefix_caching": created.enable_caching,
        **{name: header["scheduler"][name] for name in ("max_num_seqs", "max_num_batched_tokens")},
    }
    if header["command"] == COMMAND:
        facts["async_scheduling"] = False  # our engine plans a step when the one before has ended
    return MeasuredRun(
        requests=[attrs.evolve(request, sent_s=request.sent_s - start) for request in requests],
        num_failed=len(arrived) - len(requests),
        name=path.name,
        format="kvledger",
        in_engine=True,
        facts=facts,
        hash_block_size=created.hash_block_size,
    )


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            import gzip

            data = gzip.decompress(data)
        return data.decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, EOFError) as error:
        raise InputError(f"{path}: not a text file: {error}") from error


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


_Requests = tuple[list[MeasuredRequest], int]
Documents = Sequence[Mapping[str, Any]]


def _vllm_bench(documents: Documents) -> _Requests:
    document = documents[0]
    columns = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
    requests: list[MeasuredRequest] = []
    num_failed = 0
    for place, (start, inputs, outputs, ttft, gaps) in enumerate(zip(*(document[c] for c in columns), strict=True)):
        if outputs < 1 or not ttft:
            num_failed += 1
            continue
        requests.append(
            MeasuredRequest(
                name=str(place), sent_s=start, input_len=inputs, output_len=outputs, ttft_s=ttft, e2e_s=ttft + sum(gaps)
            )
        )
    return requests, num_failed


def _guidellm(documents: Documents) -> _Requests:
    groups = documents[0]["benchmarks"][0]["requests"]
    requests = [
        MeasuredRequest(
            name=str(row["request_id"]),
            sent_s=row["request_start_time"],
            input_len=row["prompt_tokens"],
            output_len=row["output_tokens"],
            ttft_s=row["time_to_first_token_ms"] / 1e3,
            e2e_s=row["request_latency"],
        )
        for row in groups["successful"]
    ]
    return requests, sum(len(rows) for name, rows in groups.items() if name in ("errored", "incomplete") and rows)


def _aiperf(documents: Documents) -> _Requests:
    requests: list[MeasuredRequest] = []
    for document in documents:
        metrics, metadata = document["metrics"], document["metadata"]
        if document.get("error") is not None:
            continue
        requests.append(
            MeasuredRequest(
                name=str(metadata["x_request_id"]),
                sent_s=metadata["request_start_ns"] / 1e9,
                input_len=int(metrics["input_sequence_length"]["value"]),
                output_len=int(metrics["output_sequence_length"]["value"]),
                ttft_s=_seconds(metrics["time_to_first_token"]),
                e2e_s=_seconds(metrics["request_latency"]),
            )
        )
    return requests, len(documents) - len(requests)


def _seconds(figure: Mapping[str, Any]) -> float:
    return figure["value"] * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}[figure["unit"]]


def _llmservingsim(documents: Documents) -> _Requests:
    requests = [
        MeasuredRequest(
            name=str(row["request_id"]),
            sent_s=row["queued_ts"],
            input_len=row["input_toks"],
            output_len=row["output_toks"],
            ttft_s=row["first_token_ts"] - row["queued_ts"],
            e2e_s=row["last_token_ts"] - row["queued_ts"],
            queue_s=row["scheduled_ts"] - row["queued_ts"],
        )
        for row in documents
    ]
    return requests, 0


_FORMATS: Mapping[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Documents], _Requests]]] = {
    "vLLM bench": (lambda document: "ttfts" in document and "start_times" in document, _vllm_bench),
    "GuideLLM": (lambda document: "benchmarks" in document, _guidellm),
    "AIPerf": (lambda document: "metadata" in document and "metrics" in document, _aiperf),
    "LLMServingSim": (lambda document: "queued_ts" in document, _llmservingsim),
}


def _with_blocks(requests: Sequence[MeasuredRequest], tokens: Path) -> list[MeasuredRequest]:
    """The requests with ids of their prompts' blocks: equal ids where everything up to the block's end is equal."""
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    rows = _lines(_text(tokens))
    if len(rows) != len(requests):
        raise InputError(f"{tokens}: {len(rows):,} prompts for {len(requests):,} requests")
    found: list[MeasuredRequest] = []
    for number, (request, row) in enumerate(zip(requests, rows, strict=True), start=1):
        prompt = row.get("input_tok_ids", row.get("prompt_token_ids"))
        if not isinstance(prompt, list) or len(prompt) != request.input_len:
            has = f"{len(prompt):,} tokens" if isinstance(prompt, list) else "no input_tok_ids"
            raise InputError(f"{tokens}:{number}: {has}; request {request.name} has {request.input_len:,}")
        parent, ids = 0, list[int]()
        for start in range(0, len(prompt), BLOCK_SIZE):
            parent = known.setdefault((parent, tuple(prompt[start : start + BLOCK_SIZE])), len(known) + 1)
            ids.append(parent)
        found.append(attrs.evolve(request, hash_ids=tuple(ids)))
    return found


def _beside(path: Path) -> tuple[dict[str, Any], Table | None]:
    """Options and series of the files beside `NAME.req.jsonl`: `NAME.meta.json` and `NAME.ts.csv`."""
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".req")
    meta, series = path.with_name(f"{stem}.meta.json"), path.with_name(f"{stem}.ts.csv")
    facts: dict[str, Any] = {}
    if meta.is_file():
        document = json.loads(_text(meta))
        given: dict[str, Any] = document.get("engine_kwargs") or {}
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "tensor_parallel_size"):
            if given.get(name) is not None:
                facts[name] = given[name]
        cache: dict[str, Any] = document.get("kv_cache") or {}
        if cache.get("num_gpu_blocks"):
            facts |= {"num_gpu_blocks_override": cache["num_gpu_blocks"], "block_size": cache["block_size"]}
            facts["enable_prefix_caching"] = cache["enable_prefix_caching"]
    return facts, _series(series) if series.is_file() else None


def _series(path: Path) -> Table:
    names = {"t": "time_s", "running": "running", "waiting": "waiting", "kv_cache_pct": "kv_cache_usage"}
    rows = list(csv.DictReader(_text(path).splitlines()))
    columns = {new: [float(row[old]) for row in rows] for old, new in names.items() if rows and old in rows[0]}
    if "kv_cache_usage" in columns:
        columns["kv_cache_usage"] = [value / 100 for value in columns["kv_cache_usage"]]
    return Table(columns)

"""Runs of a real server, request by request: result files of benchmark clients, and what they say of the server.

vLLM bench      one JSON document of `vllm bench serve --save-result --save-detailed`
GuideLLM        its benchmarks.json; the first benchmark
AIPerf          profile_export.jsonl, a record a line
LLMServingSim   *.req.jsonl, a record a line, timed inside the engine; beside it *.meta.json and *.ts.csv
kvledger        the directory of `kvledger serve --log`
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from ...core.errors import InputError
from ...core.events import Commit, RowsAssigned, TokensPlaced, as_ints
from ..scenario.results import Table
from ..traces.trace import TraceRequest

_Read = TypeVar("_Read")
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
        if tokens is not None:
            raise InputError(
                f"--tokens {tokens} has no effect on {path}: a log holds the blocks of its prompts; leave it out"
            )
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
        raise InputError(
            f"{path}: no run that is known here: {', '.join(_FORMATS)}, or the directory of kvledger serve --log. Save "
            "vllm bench serve with --save-result --save-detailed; kvledger validate reads its summary alone"
        )
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


@attrs.define(eq=False)
class _Served:
    """A request of a live engine: the ends of its prompt's last step and of its own last, ns of the log's clock."""

    name: str
    arrival_s: float
    num_prompt_tokens: int
    first_ns: int | None = None
    last_ns: int | None = None


def _live_run(path: Path) -> MeasuredRun:
    """The requests of a live engine's log: a token of a request comes at the end of the step that computes it."""
    from ...backends.serving.engine.recording import COMMAND
    from ...backends.sinks.log.rows import LoggedCommit, RequestArrived, RequestEnded, StepComputed
    from ..traces.logged import open_event_log, open_logged_trace

    reader = open_event_log(path)
    header = reader.manifest.header
    if header.get("command") != COMMAND:
        command = header.get("command", "no command")
        raise InputError(
            f"{path}: the log of {command}, not of kvledger serve; `kvledger log replay` runs other logs again"
        )
    served: list[_Served] = []
    running: dict[str, _Served] = {}  # by id: a later request may reuse one
    request_in: dict[int, str] = {}
    prompt_ends: list[_Served] = []  # those whose whole prompt the running step computes
    offset_ns, now_ns = float("inf"), 0
    for record in reader.records():
        now_ns = record.time_ns or now_ns
        if isinstance(record, LoggedCommit):
            for request, end in _placed(record.commit, request_in):
                if request in running and end >= running[request].num_prompt_tokens:
                    prompt_ends.append(running[request])
        elif isinstance(note := record.note, RequestArrived):
            running[note.request_id] = _Served(note.request_id, note.arrival_s, note.num_prompt_tokens)
            served.append(running[note.request_id])
            offset_ns = min(offset_ns, now_ns - note.arrival_s * 1e9)
        elif isinstance(note, StepComputed):
            for each in prompt_ends:
                each.first_ns = each.first_ns or now_ns
            prompt_ends.clear()
        elif isinstance(note, RequestEnded) and note.reason not in ("abort", "error"):
            running[note.request_id].last_ns = now_ns
    requests: list[MeasuredRequest] = []
    in_order = sorted(served, key=lambda each: each.arrival_s)
    for each, row in zip(in_order, open_logged_trace(path), strict=True):
        if each.first_ns is None or each.last_ns is None:
            continue
        first_s, last_s = ((ns - offset_ns) / 1e9 - each.arrival_s for ns in (each.first_ns, each.last_ns))
        requests.append(
            MeasuredRequest(
                name=each.name,
                sent_s=row.arrival_s,
                input_len=row.input_length,
                output_len=row.output_length,
                ttft_s=first_s,
                e2e_s=max(first_s, last_s),
                hash_ids=row.hash_ids,
            )
        )
    if not requests:
        raise InputError(f"{path}: none of the {len(served):,} requests was answered")
    created = reader.created
    return MeasuredRun(
        requests=requests,
        num_failed=len(served) - len(requests),
        name=path.name,
        format="kvledger",
        in_engine=True,
        facts={
            "num_gpu_blocks_override": created.num_blocks,
            "block_size": created.groups[0].block_size,
            "enable_prefix_caching": created.enable_caching,
            "async_scheduling": False,  # our engine plans a step when the one before has ended
            **{name: header["scheduler"][name] for name in ("max_num_seqs", "max_num_batched_tokens")},
        },
        hash_block_size=created.hash_block_size,
    )


def _placed(commit: Commit, request_in: dict[int, str]) -> Iterator[tuple[str, int]]:
    """Each request whose tokens a commit places, and the position behind the last; keeps which row is whose."""
    for event in commit.events:
        if isinstance(event, RowsAssigned):
            request_in.update(zip(as_ints(event.rows), event.requests, strict=True))
        elif isinstance(event, TokensPlaced):
            columns = (as_ints(event.rows), as_ints(event.first_positions), as_ints(event.counts))
            yield from ((request_in[row], first + count) for row, first, count in zip(*columns, strict=True))


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
    try:
        rows: Documents = _lines(_text(tokens))
    except ValueError as error:
        raise InputError(f"{tokens}: not a JSON record a line: {error}") from error
    if len(rows) != len(requests):
        raise InputError(f"{tokens}: {len(rows):,} prompts for {len(requests):,} requests")
    found: list[MeasuredRequest] = []
    for number, (request, row) in enumerate(zip(requests, rows, strict=True), start=1):
        prompt = row.get("input_tok_ids", row.get("prompt_token_ids")) if isinstance(row, dict) else None
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
    return (
        _read_as("the server's settings", meta, _facts) if meta.is_file() else {},
        _read_as("the server's load", series, _series) if series.is_file() else None,
    )


def _read_as(what: str, path: Path, read: Callable[[Path], _Read]) -> _Read:
    try:
        return read(path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise InputError(f"{path}: read as {what} beside the run, but {problem}; mend it or take it away") from error


def _facts(path: Path) -> dict[str, Any]:
    document = json.loads(_text(path))
    given: dict[str, Any] = document.get("engine_kwargs") or {}
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "tensor_parallel_size")
    facts = {name: given[name] for name in names if given.get(name) is not None}
    cache: dict[str, Any] = document.get("kv_cache") or {}
    if cache.get("num_gpu_blocks"):
        facts |= {"num_gpu_blocks_override": cache["num_gpu_blocks"], "block_size": cache["block_size"]}
        facts["enable_prefix_caching"] = cache["enable_prefix_caching"]
    return facts


def _series(path: Path) -> Table:
    names = {"t": "time_s", "running": "running", "waiting": "waiting", "kv_cache_pct": "kv_cache_usage"}
    rows = list(csv.DictReader(_text(path).splitlines()))
    columns = {new: [float(row[old]) for row in rows] for old, new in names.items() if rows and old in rows[0]}
    if "kv_cache_usage" in columns:
        columns["kv_cache_usage"] = [value / 100 for value in columns["kv_cache_usage"]]
    return Table(columns)

"""Measured servers: what a real server was, what it was asked, and what its client measured.

One JSON object a line, as in golden/measured_serving.jsonl. Every field is named in errors with its file and line.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
from kvledger.core.errors import InputError
from kvledger.sim.workloads.multi_turn import MultiTurnParameters, Stage

_SIXTEEN_BITS = "fp16/bf16"
_LATENCIES = ("e2e_mean", "e2e_p90", "e2e_p99", "ttft_mean", "ttft_p90", "ttft_p99", "itl_mean")


@attrs.frozen(kw_only=True)
class MeasuredLatencies:
    """What the client measured, in ms. `itl_mean` is the mean gap between text chunks of a stream."""

    e2e_mean: float
    e2e_p90: float
    e2e_p99: float
    ttft_mean: float
    ttft_p90: float
    ttft_p99: float
    itl_mean: float

    def chunks(self) -> float:
        """Text chunks of a request after its first: the time after the first token over the mean gap."""
        return (self.e2e_mean - self.ttft_mean) / self.itl_mean

    def ms_per_token(self, output_tokens: int) -> float:
        """Time after the first token over the tokens after it: what a step took, whatever a chunk held."""
        return (self.e2e_mean - self.ttft_mean) / (output_tokens - 1)


@attrs.frozen(kw_only=True)
class MeasuredServer:
    """One server under one workload.

    Attributes:
        name: id of the run.
        engine, model, gpu: as recorded.
        tensor_parallel_size, max_num_seqs, max_num_batched_tokens, block_size: the server's options.
        num_gpu_blocks: of its pool, the null block included.
        weights_dtype: `auto`: 16 bits; else a quantisation scheme.
        workload: sessions, lengths and stages; how turns and arrivals came about is not recorded.
        measured: over all requests.
        stages: the same for each stage.
    """

    name: str
    engine: str
    model: str
    gpu: str
    tensor_parallel_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_gpu_blocks: int
    weights_dtype: str
    workload: MultiTurnParameters
    measured: MeasuredLatencies
    stages: tuple[MeasuredLatencies, ...]


def read_measured_serving(path: Path) -> Iterator[MeasuredServer]:
    """Every server of a file.

    Raises:
        InputError: the file cannot be read, or a line is not such a record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            document = json.loads(line)
        except ValueError as error:
            raise InputError(f"{place}: not a JSON object: {error}") from error
        yield _server(_Record(_object(document, place), place))


@attrs.frozen
class _Record:
    values: Mapping[str, Any]
    place: str

    def _value(self, name: str) -> Any:
        if name not in self.values:
            raise InputError(f"{self.place}: {name} is missing")
        return self.values[name]

    def text(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str):
            raise InputError(f"{self.place}: {name} is {value!r}; expected a string")
        return value

    def integer(self, name: str) -> int:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{self.place}: {name} is {value!r}; expected a whole number above 0")
        return value

    def number(self, name: str) -> float:
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise InputError(f"{self.place}: {name} is {value!r}; expected a number above 0")
        return float(value)

    def record(self, name: str) -> "_Record":
        return _Record(_object(self._value(name), f"{self.place}: {name}"), f"{self.place}: {name}")

    def records(self, name: str) -> list["_Record"]:
        value = self._value(name)
        if not isinstance(value, list) or not value:
            raise InputError(f"{self.place}: {name} is {value!r}; expected a list with at least one object")
        places = [f"{self.place}: {name}[{index}]" for index in range(len(value))]
        return [_Record(_object(item, place), place) for item, place in zip(value, places, strict=True)]


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{place}: expected an object, not {value!r}")
    return cast("dict[str, Any]", value)


def _server(record: _Record) -> MeasuredServer:
    block_size = record.integer("block_size")
    workload = _workload(record.record("workload"), block_size)
    measured = record.record("measured_ms")
    weights_dtype = record.text("weights_dtype")
    return MeasuredServer(
        name=record.text("id"),
        engine=record.text("engine"),
        model=record.text("model"),
        gpu=record.text("gpu"),
        tensor_parallel_size=record.integer("tensor_parallel_size"),
        max_num_seqs=record.integer("max_num_seqs"),
        max_num_batched_tokens=record.integer("max_num_batched_tokens"),
        block_size=block_size,
        num_gpu_blocks=record.integer("num_gpu_blocks"),
        weights_dtype="auto" if weights_dtype == _SIXTEEN_BITS else weights_dtype,
        workload=workload,
        measured=_latencies(measured.record("all")),
        stages=tuple(_latencies(measured.record(f"stage{index}")) for index in range(len(workload.stages))),
    )


def _workload(record: _Record, block_size: int) -> MultiTurnParameters:
    return MultiTurnParameters(
        unique_system_prompts=record.integer("unique_system_prompts"),
        users_per_system_prompt=record.integer("users_per_system_prompt"),
        system_prompt_tokens=record.integer("system_prompt_tokens"),
        question_tokens=record.integer("question_tokens"),
        output_tokens=record.integer("output_tokens"),
        stages=tuple(
            Stage(stage.number("duration_s"), stage.number("requests_per_s")) for stage in record.records("stages")
        ),
        block_size=block_size,
    )


def _latencies(record: _Record) -> MeasuredLatencies:
    return MeasuredLatencies(**{name: record.number(name) for name in _LATENCIES})

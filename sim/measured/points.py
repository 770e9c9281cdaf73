"""Serving points that were measured at a fixed concurrency: a CSV table with a row for each."""

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from ...core.errors import InputError
from ...core.models.geometry import ModelGeometry, load_geometry
from ..latency.devices import Device, find_device
from ..scenario.scenario import DEFAULT_HTTP_MS

COLUMNS = ("id", "backend", "model_path", "system", "mode", "isl", "osl", "batch_size", "tp_size")
"""Columns that a table must have; others are read where there are some."""
TTFT, TPOT = "silicon_ttft_ms", "silicon_tpot_ms"
# What a precision of the table is called as a quantization here.
_QUANTIZATIONS = {"fp8": "fp8", "fp4": "nvfp4", "int4": "int4", "bf16": "none", "": "auto"}
# Precisions of the table that are those in which a model was published, by the method of its own config.
_OWN_METHODS = (("fp8", "fp8"), ("int4", "compressed-tensors"))
_SUFFIXES = r"(?i)[-_](fp8|nvfp4|fp4|int4|instruct|it|chat|bf16)$"


@attrs.frozen(kw_only=True)
class MeasuredPoint:
    """One measurement: a fixed number of users, each of whom sends its next request when the last one has ended.

    Attributes:
        name: the row's id.
        engine, engine_version: what served.
        geometry: the model.
        precision: as the table says.
        quantization: a quantization scheme, `auto` (the model's own) or `none`.
        is_requantized: whether its checkpoint is a quantized copy of what the model's makers published.
        device: GPU type.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size, expert_parallel_size: ranks. With several
            data-parallel ranks a node's `tensor_parallel_size` GPUs each run the attention of their own requests.
        concurrency: users of the whole server.
        input_len, output_len: the longest prompt and output, tokens.
        shortest: of the longest: lengths are drawn uniformly between the two.
        ttft_ms, tpot_ms: means; None where not measured.
        place: file and line.
        http_s: what the HTTP server adds to TTFT, seconds; 0 where the engine itself took the times.
    """

    name: str
    engine: str
    engine_version: str
    geometry: ModelGeometry
    precision: str
    quantization: str
    is_requantized: bool
    device: Device
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel_size: int
    concurrency: int
    input_len: int
    output_len: int
    ttft_ms: float | None
    tpot_ms: float | None
    place: str
    shortest: float = 0.8
    http_s: float = DEFAULT_HTTP_MS / 1e3

    @property
    def pair(self) -> str:
        """Card, model and precision: `H100 | llama-3.1-70b | fp8`."""
        return " | ".join((self.device.name, self.geometry.name, self.precision))


@attrs.frozen
class LeftOut:
    """A row that is not a point here, and why."""

    place: str
    name: str
    reason: str


def read_points(path: Path, engine: str | None = None) -> tuple[list[MeasuredPoint], list[LeftOut]]:
    """Read a table; rows of other engines than `engine` are passed over, rows that cannot be asked are left out.

    Raises InputError: the file cannot be read, lacks a column of `COLUMNS`, or has no row of the engine.
    """
    points: list[MeasuredPoint] = []
    left_out: list[LeftOut] = []
    num_rows = 0
    for place, row in _rows(path):
        if engine is not None and row["backend"] != engine:
            continue
        num_rows += 1
        try:
            points.append(_point(row, place))
        except InputError as error:
            left_out.append(LeftOut(place, row["id"], str(error)))
    if not num_rows:
        raise InputError(f"{path}: no row of {engine or 'any engine'}")
    return points, left_out


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(f"{path}:1: the header lacks {', '.join(missing)}")
            for number, row in enumerate(reader, start=2):
                yield f"{path.name}:{number}", {name: value or "" for name, value in row.items() if name}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file: {error}") from error


def _point(row: Mapping[str, str], place: str) -> MeasuredPoint:
    if row["mode"] != "agg":
        raise InputError(f"mode {row['mode']!r}: prefill and decode on separate engines")
    geometry = _geometry(row["model_path"])
    quantization = _QUANTIZATIONS.get(row.get("precision", ""), row.get("precision", ""))
    if geometry.name.startswith("gpt-oss"):  # published in mxfp4, which the tables call fp4
        quantization = "auto"
    own = (geometry.quantization_config or {}).get("quant_method")
    is_own = (quantization, own) in _OWN_METHODS
    is_published = (
        quantization == "fp8" and row["model_path"].upper().endswith("FP8") and "nvidia/" not in row["model_path"]
    )
    is_requantized = quantization in ("fp8", "nvfp4") and not is_own and not is_published
    quantization = "auto" if is_own else "fp8_block" if is_published else quantization
    tensor_parallel, expert_parallel = _count(row, "tp_size"), max(1, _count(row, "moe_ep_size", 1))
    per_node = max(1, _count(row, "attention_dp_size", 1))
    # Rows with data-parallel attention give the GPUs of a node as tp_size; rows that give no such ranks may spread
    # their experts over more GPUs than one attention takes. Both give the users of one rank.
    expert_gpus = max(1, _count(row, "moe_tp_size", 1)) * expert_parallel
    data_parallel = per_node if per_node > 1 else max(1, expert_gpus // tensor_parallel)
    return MeasuredPoint(
        name=row["id"],
        engine=row["backend"],
        engine_version=row.get("backend_version", ""),
        geometry=geometry,
        precision=row.get("precision", "") or "own",
        quantization=quantization,
        is_requantized=is_requantized,
        device=find_device(_device_name(row["system"])),
        tensor_parallel_size=1 if per_node > 1 else tensor_parallel,
        pipeline_parallel_size=_count(row, "pp_size", 1),
        data_parallel_size=data_parallel,
        expert_parallel_size=min(expert_parallel, data_parallel if per_node > 1 else max(tensor_parallel, expert_gpus)),
        concurrency=_count(row, "batch_size") * data_parallel,
        input_len=_count(row, "isl"),
        output_len=_count(row, "osl"),
        ttft_ms=_measured(row, TTFT),
        tpot_ms=_measured(row, TPOT),
        place=place,
    )


def _geometry(name: str) -> ModelGeometry:
    """The built-in model of a checkpoint's name: without its owner, and without words for its precision."""
    tried = name
    while True:
        try:
            return load_geometry(tried)
        except InputError:
            shorter = re.sub(_SUFFIXES, "", tried)
            if shorter == tried:
                raise InputError(f"model {name} is not built in") from None
            tried = shorter


def _device_name(system: str) -> str:
    return re.sub(r"(?i)[-_](sxm|server|nvl)$", "", system).replace("_", "-")


def _count(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = row.get(name, "")
    if not text and default is not None:
        return default
    least = 1 if default is None else 0  # tables write 0 for ranks that a server does not have
    return int(_number(text, name, lambda value: value >= least and value == int(value)))


def _measured(row: Mapping[str, str], name: str) -> float | None:
    return _number(row[name], name, lambda value: value > 0) if row.get(name) else None


def _number(text: str, name: str, is_right: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (value < float("inf") and is_right(value)):
        raise InputError(f"{name} is {text!r}")
    return value

"""`kvledger size`: the search over engine shapes, as one document, and its tables."""

from typing import Any

import attrs

from ..core.errors import DoesNotFitError, InputError
from .console import console, percent, progress, table
from .engine_options import EngineOptions, open_source, read_engine
from .replay_report import seconds, shown, trace_as_dict
from .sizing import Setting, highest_rate, smallest_fleet
from .slo import Slo
from .slo_search import SearchResult, Trial, confidence_interval
from .tornado import assumptions_of, tornado

SIZES_UNLESS_GIVEN = (1, 2, 4, 8)


@attrs.frozen(kw_only=True)
class SizeQuestion:
    """What `kvledger size` was asked; `given` holds the options of `kvledger replay`."""

    given: dict[str, Any]
    slo: Slo
    tensor_parallel_sizes: str | None
    data_parallel_size: int
    routing: str
    routing_load_weight: float | None
    event_delay_s: float
    num_replicas: int | None
    max_replicas: int
    num_seeds: int | None
    with_tornado: bool

    def __attrs_post_init__(self) -> None:
        if self.max_replicas < 1:
            raise InputError(f"--max-replicas is {self.max_replicas}; it must be at least 1")
        if self.num_replicas is not None and (self.num_replicas < 1 or self.with_tornado or self.num_seeds is not None):
            raise InputError(
                f"--replicas is {self.num_replicas}; it must be at least 1, and goes with neither --seeds nor --tornado"
            )
        if self.num_seeds is not None and (self.num_seeds < 1 or self.given["workload"] is None):
            raise InputError(
                f"--seeds {self.num_seeds} has no effect: it must be 1 or more, and only a --workload is drawn anew"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs of a replica to try."""
        text = self.tensor_parallel_sizes
        if text is None:
            return SIZES_UNLESS_GIVEN if self.given["model"] else (1,)
        try:
            sizes = tuple(sorted({int(word) for word in text.split(",")}))
        except ValueError:
            sizes = ()
        if not sizes or sizes[0] < 1:
            raise InputError(f"--tensor-parallel-sizes is {text!r}; it must be whole numbers such as 2,4,8")
        return sizes

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """Seeds of the workload; None where the options name none."""
        if self.num_seeds is None:
            return (None,)
        first = self.given["seed"] or 0
        return tuple(range(first, first + self.num_seeds))


def size_document(question: SizeQuestion) -> dict[str, Any]:
    """The search over every shape: `answer` (None where nothing keeps the SLO), `shapes`, `tornado`, `trace`.

    With `num_replicas`, the highest rate of each shape, the highest of them first.
    """
    if question.num_replicas is not None:
        return rate_document(question, question.num_replicas)
    shapes: list[dict[str, Any]] = []
    settings: dict[int, Setting] = {}
    fewest_gpus: int | None = None
    bar, task = progress("Shapes tried", total=len(question.sizes))
    with bar:
        for size in question.sizes:
            gpus = size * question.given["pipeline_parallel_size"] * question.data_parallel_size
            # A shape that needs more GPUs than the best one so far is no answer: it is not searched any further.
            most = question.max_replicas if fewest_gpus is None else min(question.max_replicas, fewest_gpus // gpus)
            shape = _shape(question, size, gpus, most, settings)
            shapes.append(shape)
            if shape["gpus"] is not None and (fewest_gpus is None or shape["gpus"] < fewest_gpus):
                fewest_gpus = shape["gpus"]
            bar.advance(task)
    source = open_source(question.given)
    for _ in source:
        pass
    best = min(
        (shape for shape in shapes if shape["gpus"] is not None),
        key=lambda shape: (shape["gpus"], shape["replicas"]),
        default=None,
    )
    rows: list[dict[str, Any]] = []
    if question.with_tornado and best is not None:
        setting = settings[best["tensor_parallel_size"]]
        rows = tornado(setting, best["replicas"], question.max_replicas, assumptions_of(setting))
    return {
        "trace": trace_as_dict(source.info, source.info.trace_block_size),
        "slo": question.slo.as_dict(),
        "answer": None if best is None else _answer(question, best),
        "assumptions": {} if best is None else _assumptions(best, best["replicas"]),
        "shapes": shapes,
        "tornado": rows,
        "most_important": [row["assumption"] for row in rows[:2]],
    }


def _shape(question: SizeQuestion, size: int, gpus: int, most: int, settings: dict[int, Setting]) -> dict[str, Any]:
    """The search with one engine shape, over all seeds."""
    row: dict[str, Any] = {
        "tensor_parallel_size": size,
        "gpus_per_replica": gpus,
        "num_gpu_blocks": None,
        "replicas": None,
        "gpus": None,
        "reason": None,
        "searches": [],
    }
    if most < 1:
        return {**row, "reason": "one replica needs more GPUs than a smaller shape's whole fleet"}
    try:
        engine = read_engine({**question.given, "tensor_parallel_size": size})
    except (DoesNotFitError, InputError) as error:
        if question.given["model"] is None:
            raise
        return {**row, "reason": str(error)}
    row["num_gpu_blocks"] = engine.pool.allocator.num_blocks
    row["assumptions"] = engine.pool.facts
    answers: list[int] = []
    start = 1
    for seed in question.seeds:
        setting = _setting(question, engine, seed)
        settings.setdefault(size, setting)
        found = smallest_fleet(setting, start=min(start, most), most=most)
        row["searches"].append(_search(seed, found))
        if found.answer is None:
            return {**row, "reason": f"more than {most:,} replicas" + _last_figures(found.trials[-1], most)}
        answers.append(int(found.answer))
        start = answers[-1]
    row["replicas"] = max(answers)
    row["gpus"] = max(answers) * gpus
    row["replicas_over_seeds"] = confidence_interval([float(answer) for answer in answers]).as_dict()
    return row


def _setting(question: SizeQuestion, engine: EngineOptions, seed: int | None) -> Setting:
    return Setting(
        open_trace=lambda: open_source(question.given, seed),
        parts=engine.parts,
        slo=question.slo,
        routing=question.routing,
        routing_load_weight=question.routing_load_weight,
        data_parallel_size=question.data_parallel_size,
        event_delay_s=question.event_delay_s,
    )


def rate_document(question: SizeQuestion, num_replicas: int) -> dict[str, Any]:
    """The highest rate that a given number of replicas serves within the SLO, for each shape."""
    shapes: list[dict[str, Any]] = []
    for size in question.sizes:
        gpus = size * question.given["pipeline_parallel_size"] * question.data_parallel_size
        row: dict[str, Any] = {"tensor_parallel_size": size, "gpus_per_replica": gpus, "num_gpu_blocks": None}
        row |= {"replicas": num_replicas, "gpus": gpus * num_replicas, "rate_scale": None, "reason": None}
        row["searches"] = []
        shapes.append(row)
        try:
            engine = read_engine({**question.given, "tensor_parallel_size": size})
        except (DoesNotFitError, InputError) as error:
            if question.given["model"] is None:
                raise
            row["reason"] = str(error)
            continue
        row["num_gpu_blocks"], row["assumptions"] = engine.pool.allocator.num_blocks, engine.pool.facts
        found = highest_rate(_setting(question, engine, None), num_replicas)
        row["rate_scale"] = found.answer
        row["searches"].append({**_search(None, found), "replicas": num_replicas})
        if found.answer is None:
            row["reason"] = f"not even at {found.trials[0].value:g} times the rate" + _last_figures(found.trials[0])
    source = open_source(question.given)
    for _ in source:
        pass
    trace = trace_as_dict(source.info, source.info.trace_block_size)
    best = max((row for row in shapes if row["rate_scale"]), key=lambda row: row["rate_scale"], default=None)
    return {
        "trace": trace,
        "slo": question.slo.as_dict(),
        "answer": None if best is None else _rate_answer(question, best, trace),
        "assumptions": {} if best is None else _assumptions(best, best["rate_scale"]),
        "shapes": shapes,
        "tornado": [],
        "most_important": [],
    }


def _rate_answer(question: SizeQuestion, best: dict[str, Any], trace: dict[str, Any]) -> dict[str, Any]:
    window, scale = trace["window"], best["rate_scale"]
    span_s = (window["end_s"] - window["start_s"]) / trace["rate_scale"]
    per_s = trace["num_requests"] / span_s * scale if span_s else None
    promises = ", ".join(f"{name} {value:g}" for name, value in question.slo.as_dict().items())
    rate = "" if per_s is None else f", {per_s:,.3g} requests/s,"
    return {
        "sentence": f"{best['replicas']} replicas serve {scale:.3g} times the traffic{rate} and keep {promises}",
        "gpu": question.given["gpu"],
        "gpus": best["gpus"] if question.given["gpu"] else None,
        "replicas": best["replicas"],
        "tensor_parallel_size": best["tensor_parallel_size"],
        "rate_scale": scale,
        "requests_per_s": per_s,
    }


def _search(seed: int | None, found: SearchResult) -> dict[str, Any]:
    return {
        "seed": seed,
        "replicas": None if found.answer is None else int(found.answer),
        "is_monotone": found.is_monotone,
        "contradictions": [{"met": met, "missed": missed} for met, missed in found.contradictions],
        "trials": [trial.as_dict() for trial in found.trials],
    }


def _last_figures(trial: Trial, num_replicas: int | None = None) -> str:
    values = ", ".join(
        f"{name} {'missed' if figure['value'] is None else format(figure['value'], '.4g')} (limit {figure['limit']:g})"
        for name, figure in trial.verdict.figures.items()
        if not figure["met"]
    )
    return f": {'it' if num_replicas is None else num_replicas} gave {values}"


def _answer(question: SizeQuestion, best: dict[str, Any]) -> dict[str, Any]:
    gpu = question.given["gpu"]
    promises = ", ".join(f"{name} {value:g}" for name, value in question.slo.as_dict().items())
    engine = f"{best['gpus_per_replica']} x {gpu}" if gpu else "one engine"
    replicas = "1 replica" if best["replicas"] == 1 else f"{best['replicas']} replicas"
    total = f"{best['gpus']} x {gpu}: " if gpu else ""
    return {
        "sentence": f"{total}{replicas} of {engine} each keep {promises}",
        "gpu": gpu,
        "gpus": best["gpus"] if gpu else None,
        "replicas": best["replicas"],
        "tensor_parallel_size": best["tensor_parallel_size"],
    }


def _assumptions(best: dict[str, Any], value: float) -> dict[str, Any]:
    """What the answer rests on: where the pool comes from, and those of the run that is the answer."""
    trials = [trial for search in best["searches"] for trial in search["trials"]]
    run = next(trial for trial in trials if trial["value"] == value and trial["met"])
    return {**best["assumptions"], **run["assumptions"]}


def print_size(document: dict[str, Any]) -> None:
    """The answer, the shapes, the runs on both sides of the answer, and what it rests on."""
    out = console()
    answer = document["answer"]
    out.print(f"[bold]{answer['sentence'] if answer else 'No fleet tried keeps the SLO'}[/bold]", soft_wrap=True)
    rows = [
        (
            f"{shape['tensor_parallel_size']}",
            "-" if shape["num_gpu_blocks"] is None else f"{shape['num_gpu_blocks']:,}",
            "-" if shape["replicas"] is None else f"{shape['replicas']:,}",
            "-" if shape["gpus"] is None else f"{shape['gpus']:,}",
            (shape["reason"] or "").split(". ")[0],
        )
        for shape in document["shapes"]
    ]
    out.print(table("Shapes tried", ("TP", "blocks", "replicas", "GPUs", "why not"), rows, left=(4,)))
    for shape in document["shapes"]:
        _print_searches(shape)
    if document["tornado"]:
        _print_tornado(document)
    if document["assumptions"]:
        out.print("[bold]Assumptions[/bold] (change them with the options of the same names)")
        rows = [(name, shown(value)) for name, value in document["assumptions"].items()]
        out.print(table(None, ("assumption", "value"), rows, left=(0, 1)))


def _print_searches(shape: dict[str, Any]) -> None:
    for search in shape["searches"]:
        rows = [
            (
                f"{trial['value']:,.4g}",
                "met" if trial["met"] else "missed",
                seconds(trial["ttft_s"]["p99"]) if "ttft_s" in trial else "-",
                seconds(trial["tpot_s"]["p99"]) if "tpot_s" in trial else "-",
                percent(trial["prefix_cache_hit_rate"]) if "ttft_s" in trial else "-",
                percent(trial["mean_busy_share"], 1) if "ttft_s" in trial else _stopped(trial),
            )
            for trial in search["trials"]
        ]
        seed = "" if search["seed"] is None else f", seed {search['seed']}"
        worse = "lighter traffic" if "rate_scale" in shape else "a larger fleet"
        doubt = "" if search["is_monotone"] else f" (NOT MONOTONE: {worse} did worse)"
        title = f"Runs with tensor parallel size {shape['tensor_parallel_size']}{seed}{doubt}"
        tried = "times the rate" if "rate_scale" in shape else "replicas"
        console().print(table(title, (tried, "SLO", "TTFT p99", "TPOT p99", "hit rate", "busy"), rows))


def _stopped(trial: dict[str, Any]) -> str:
    return f"ended at request {trial['stopped_after_requests']:,}: missed for certain"


def _print_tornado(document: dict[str, Any]) -> None:
    rows = []
    for row in document["tornado"]:
        ends = [
            f"{row[end]['value']}: {'-' if row[end]['replicas'] is None else row[end]['replicas']}"
            for end in ("low", "high")
        ]
        rows.append((row["assumption"], *ends, f"{row['swing_replicas']:,g}", f"{row['swing_slo']:,.3g}"))
    title = "What would change the answer (replicas at either end); most of all: " + ", ".join(
        document["most_important"]
    )
    console().print(
        table(title, ("assumption", "low", "high", "swing", "swing of the SLO figure"), rows, left=(0, 1, 2))
    )

"""Runs `kvledger size`: searches engine shapes and seeds for the smallest fleet, or the highest rate, with an SLO."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ...core.errors import DoesNotFitError, InputError
from ..figures import Document
from ..latency.devices import find_device
from ..scenario.defaults import served
from ..scenario.deployment import read_question
from ..scenario.engine import Engine, engine_of
from ..scenario.results import trace_as_dict
from ..scenario.scenario import Scenario
from ..scenario.traffic import open_traffic
from .idle_engine import idle_bound
from .jobs import reason
from .size_question import SizeOptions, SizeQuestion
from .sizing import SearchWatch, Setting
from .slo import SearchResult, Slo, confidence_interval, search_result
from .tornado import assumptions_of, most_important, ranked, tornado

HOURS_A_MONTH = 730
# Share of the feasible requests (those that an idle engine serves in time) that the relaxed SLO demands.
SHARE_OF_FEASIBLE = 0.99


def answer_of(question: SizeQuestion, best: Mapping[str, Any], trace: Mapping[str, Any]) -> Document:
    """The answer of the best shape."""
    gpu = question.scenario.gpu
    out: Document = {"sentence": "", "gpu": gpu, "gpus": best["gpus"] if gpu else None}
    out |= {name: best[name] for name in ("replicas", "tensor_parallel_size", "rate_scale") if name in best}
    if "rate_scale" in best:
        out["requests_per_s"] = _requests_per_s(best["rate_scale"], trace)
    longest = best["assumptions"].get("longest_request")
    out["sentence"] = _sentence(question, best, out.get("requests_per_s")) + _doubts(best)
    out["sentence"] += f" (longest request: {longest})" if longest else ""
    out["cost"] = _cost(question, best)
    return out


def promises(slo: Slo) -> str:
    """`p99 TTFT within 2 s and p99 TPOT within 0.1 s`."""
    words: list[str] = []
    if slo.ttft_p99_s is not None:
        words.append(f"p99 TTFT within {slo.ttft_p99_s:g} s")
    if slo.tpot_p99_s is not None:
        words.append(f"p99 TPOT within {slo.tpot_p99_s:g} s")
    if slo.e2e_p99_s is not None:
        words.append(f"p99 E2E within {slo.e2e_p99_s:g} s")
    if slo.goodput_share is not None:
        limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "E2E": slo.e2e_s}
        each = " and ".join(f"{name} within {limit:g} s" for name, limit in limits.items() if limit is not None)
        words.append(f"{each} for {slo.goodput_share * 100:g} % of the requests")
    return " and ".join(words)


def misses(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Lists the SLO figures that are missed, with their limits."""
    names = {"ttft_p99_s": "p99 TTFT", "tpot_p99_s": "p99 TPOT", "e2e_p99_s": "p99 E2E"}
    names["goodput_share"] = "goodput share"
    parts = [
        f" {names[name]} {'missed' if figure['value'] is None else format(figure['value'], '.4g')}"
        f"{'' if name == 'goodput_share' or figure['value'] is None else ' s'} (limit {figure['limit']:g})"
        for name, figure in figures.items()
        if not figure["met"]
    ]
    return ",".join(parts)


def options_of_feasible_requests(slo: Slo, shapes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Options of the SLO relaxed to nearly as many requests as an idle engine serves in time.

    None unless every shape with a pool misses the SLO even on an idle engine.
    """
    planned = [shape for shape in shapes if shape["num_gpu_blocks"] is not None]
    if slo.goodput_share is not None or not planned or any(shape["searches"] for shape in planned):
        return None
    shares = [shape["idle_share_in_time"] for shape in planned if shape["idle_share_in_time"]]
    if not shares:
        return None
    share = math.floor(1000 * SHARE_OF_FEASIBLE * max(shares)) / 1000
    each = {"slo_ttft": slo.ttft_p99_s, "slo_tpot": slo.tpot_p99_s, "slo_e2e": slo.e2e_p99_s}
    instead = {"slo_goodput": share, **each, "slo_ttft_p99": None, "slo_tpot_p99": None, "slo_e2e_p99": None}
    return instead if share > 0 else None


def assumptions_of_answer(best: Mapping[str, Any] | None, shapes: Sequence[Mapping[str, Any]], name: str) -> Document:
    """Assumptions of the pool and of the answer's run; without an answer, of the last shape that has any."""
    if best is None:
        described = [shape for shape in shapes if shape["assumptions"]]
        if not described:
            return {}
        runs = [trial for search in described[-1]["searches"] for trial in search["trials"] if "assumptions" in trial]
        return {**described[-1]["assumptions"], **(runs[-1]["assumptions"] if runs else {})}
    run = answer_trial(best, name)
    return {**best["assumptions"], **run["assumptions"]}


def answer_trial(best: Mapping[str, Any], name: str) -> Document:
    """The run of a shape's answer."""
    trials = [trial for search in best["searches"] for trial in search["trials"]]
    return next(trial for trial in trials if trial["value"] == best[name] and trial["met"])


def _sentence(question: SizeQuestion, best: Mapping[str, Any], per_s: float | None) -> str:
    """What keeps the SLO: a fleet, or a fleet at a rate."""
    gpu, replicas, promised = question.scenario.gpu, best["replicas"], promises(question.asked.slo)
    engine = f"{best['gpus_per_replica']} x {find_device(gpu).name}" if gpu else "one engine"
    fleet = f"1 replica of {engine}" if replicas == 1 else f"{replicas:,} replicas of {engine}"
    if "rate_scale" in best:
        rate = "" if per_s is None else f", {per_s:,.3g} requests/s,"
        serve, keep = ("serves", "keeps") if replicas == 1 else ("serve", "keep")
        return f"{fleet} {serve} {best['rate_scale']:.3g} times the traffic{rate} and {keep} {promised}"
    total = f"{best['gpus']:,} x {gpu}: " if gpu else ""
    return f"{total}{fleet} {'keeps' if replicas == 1 else 'each keep'} {promised}"


def _doubts(best: Mapping[str, Any]) -> str:
    """A warning that belongs to the answer, if a search contradicts itself."""
    search = next((search for search in best["searches"] if not search["is_monotone"]), None)
    if search is None:
        return ""
    pair = search["contradictions"][0]
    unit, way = ("times the rate", "up to {:.4g}") if "rate_scale" in best else ("replicas", "from {:.4g} on")
    safe = "" if search["safe"] is None else f"; every run {way.format(search['safe'])} kept it"
    return f" (NOT MONOTONE: {pair['missed']:.4g} {unit} missed the SLO although {pair['met']:.4g} kept it{safe})"


def _requests_per_s(rate_scale: float, trace: Mapping[str, Any]) -> float | None:
    window = trace["window"]
    span_s = (window["end_s"] - window["start_s"]) / trace["rate_scale"]
    return trace["num_requests"] / span_s * rate_scale if span_s else None


def _cost(question: SizeQuestion, best: Mapping[str, Any]) -> dict[str, float] | None:
    """In the currency of the price; None without a price."""
    price = question.asked.price_per_gpu_hour
    if price is None:
        return None
    per_hour = price * best["gpus"]
    run = answer_trial(best, "rate_scale" if "rate_scale" in best else "replicas")
    return {
        "price_per_gpu_hour": price,
        "per_hour": per_hour,
        f"per_month_of_{HOURS_A_MONTH}_hours": per_hour * HOURS_A_MONTH,
        "per_million_output_tokens": per_hour / 3600 / run["output_tokens_per_s"] * 1e6,
    }


INTERRUPTED = "interrupted before it finished"


class SizeStudy:
    """Searches every shape. `to_dict` may be called at any time and holds the results so far."""

    def __init__(self, scenario: Scenario, asked: SizeOptions, watch: SearchWatch | None = None) -> None:
        """Check the question. Raises InputError: an option is missing, wrong or has no effect."""
        self._question = question = SizeQuestion(scenario=scenario, asked=asked)
        self._watch = watch or SearchWatch()
        self._shapes: list[Document] = []
        self._settings: dict[tuple[int, int | None], Setting] = {}
        self._going_on: tuple[Document, int | None] | None = None  # row and seed of the current search
        self._rows: list[Document] = []
        self._instead: SizeStudy | None = None
        self._trace: Document | None = None
        self._reason: str | None = INTERRUPTED
        self._name = question.search(1).name

    @property
    def has_runs(self) -> bool:
        """Whether a shape has been tried."""
        return bool(self._shapes)

    def run(self) -> None:
        """Search every shape; with --tornado, also find what changes the answer.

        Raises:
            InputError: an option or the trace is wrong.
            KeyboardInterrupt: passed on; `to_dict` has the results so far.
        """
        source = open_traffic(self._question.scenario)
        for _ in source:  # finds bad rows before the long runs
            pass
        self._trace = trace_as_dict(source.info)
        if self._question.scenario.model is not None:
            read_question(served(self._question.scenario.evolve(tensor_parallel_size=1)))  # refuses what no shape mends
        for size in self._question.sizes:
            self._search_shape(size)
        best = self._best()
        if best is not None and self._question.asked.tornado:
            self._ask_what_matters(best)
        if best is None and self._question.asked.replicas is None:
            self._search_feasible_requests()
        self._reason = None

    def to_dict(self) -> Document:
        """The JSON document: `answer` (None if nothing keeps the SLO), `shapes`, `tornado`, `trace`, `assumptions`."""
        question, best = self._question, self._best()
        self._note_what_goes_on()
        return {
            "trace": self._trace,
            "slo": question.asked.slo.as_dict(),
            "promises": promises(question.asked.slo),
            "asked": self._name,
            "answer": None if best is None or self._trace is None else answer_of(question, best, self._trace),
            "assumptions": assumptions_of_answer(best, self._shapes, self._name),
            "shapes": self._shapes,
            "tornado": ranked(self._rows, self._name),
            "most_important": most_important(ranked(self._rows, self._name), self._name),
            "instead": None if self._instead is None else self._instead.to_dict(),
            "not_done": self._reason,
        }

    def _best(self) -> Document | None:
        """The shape with the fewest GPUs, or the highest rate."""
        found = [shape for shape in self._shapes if shape[self._name] is not None]
        if self._name == "rate_scale":
            return max(found, key=lambda shape: shape["rate_scale"], default=None)
        return min(found, key=lambda shape: (shape["gpus"], shape["replicas"]), default=None)

    def _most_replicas(self, gpus: int) -> int:
        """Most replicas of a shape that can be the answer: not more GPUs than the best shape so far."""
        best = self._best() if self._name == "replicas" else None
        most = self._question.asked.max_replicas
        return most if best is None else min(most, best["gpus"] // gpus)

    def _search_shape(self, size: int) -> None:
        question = self._question
        gpus = size * question.scenario.pipeline_parallel_size * question.scenario.data_parallel_size
        row = _empty_row(size, gpus, self._name, question.asked.replicas)
        most = self._most_replicas(gpus)
        if most < 1:
            row["reason"] = "one replica needs more GPUs than the whole fleet of a smaller shape"
            self._shapes.append(row)
            return
        try:
            engine = engine_of(question.scenario.evolve(tensor_parallel_size=size))
        except (DoesNotFitError, InputError) as error:
            if question.scenario.model is None:
                raise
            row["reason"] = reason(error)
            self._shapes.append(row)
            return
        row["num_gpu_blocks"], row["assumptions"] = engine.pool.allocator.num_blocks, engine.pool.facts
        self._shapes.append(row)
        self._watch.shape(f"tensor parallel size {size}")
        self._search_seeds(row, engine, most)

    def _search_seeds(self, row: Document, engine: Engine, most: int) -> None:
        """Search every seed; the answer is that of the worst seed."""
        question, search = self._question, self._question.search(most)
        more = "number of replicas" if self._name == "replicas" else "lower rate"
        answers: list[float] = []
        for seed in question.seeds:
            setting = question.setting(engine, row["tensor_parallel_size"], seed)
            self._settings[row["tensor_parallel_size"], seed] = setting
            idle = idle_bound(setting.open_trace(), setting.parts, setting.slo)
            if idle is not None:
                figures = idle.verdict.figures
                row["idle"], row["idle_share_in_time"] = figures, idle.share_in_time
                if not idle.verdict.met:
                    row["reason"] = f"no {more} helps; each request alone on an idle engine gives{misses(figures)}"
                    row["assumptions"] = {**row["assumptions"], **setting.parts.latency.assumptions()}
                    return
            self._going_on = row, seed
            self._watch.trials.clear()
            start = answers[-1] if answers else None
            found = search.find(setting, start=start, probes=question.asked.probes, watch=self._watch)
            self._going_on = None
            row["searches"].append(_search_as_dict(seed, found, self._name))
            if found.answer is None:
                row["reason"] = _why_none(found, most, self._name, is_bounded=most < question.asked.max_replicas)
                return
            answers.append(found.answer if self._name == "rate_scale" else int(found.answer))
        row[self._name] = min(answers) if self._name == "rate_scale" else max(answers)
        row["gpus"] = row["replicas"] * row["gpus_per_replica"]
        row[f"{self._name}_over_seeds"] = confidence_interval([float(answer) for answer in answers])

    def _note_what_goes_on(self) -> None:
        """Add the runs of an unfinished search, and the bounds of its answer."""
        if self._going_on is None:
            return
        (row, seed), self._going_on = self._going_on, None
        partial = search_result(list(self._watch.trials.values()), None, more_is_better=self._name == "replicas")
        row["searches"].append({**_search_as_dict(seed, partial, self._name), "not_done": INTERRUPTED})
        row["reason"] = INTERRUPTED + _between(partial, self._name)

    def _ask_what_matters(self, best: Document) -> None:
        answer, size = best[self._name], best["tensor_parallel_size"]
        seed = next(one["seed"] for one in best["searches"] if one[self._name] == answer)
        setting = self._settings[size, seed]
        assumptions = assumptions_of(setting)
        search = self._question.search(self._question.asked.max_replicas)
        self._watch.tornado(0, len(assumptions))

        def on_row(row: Document) -> None:
            self._rows.append(row)
            self._watch.tornado(len(self._rows), len(assumptions))

        workers = self._question.asked.jobs
        tornado(setting, search, search.replay(setting, answer), assumptions, num_workers=workers, on_row=on_row)

    def _search_feasible_requests(self) -> None:
        """If some requests are too long for the SLO on any fleet, search the fleet that keeps it for the others."""
        question = self._question
        relaxed = options_of_feasible_requests(question.asked.slo, self._shapes)
        if relaxed is not None:
            asked = attrs.evolve(question.asked, tornado=False, jobs=1, **relaxed)
            self._instead = SizeStudy(question.scenario, asked, self._watch)
            self._instead.run()


def size_fleet(scenario: Scenario, asked: SizeOptions) -> SizeStudy:
    """Run the whole search; see `SizeStudy`."""
    study = SizeStudy(scenario, asked)
    study.run()
    return study


def _empty_row(size: int, gpus: int, name: str, num_replicas: int | None) -> Document:
    row: Document = {"tensor_parallel_size": size, "gpus_per_replica": gpus, "num_gpu_blocks": None}
    row |= {"replicas": num_replicas, "gpus": None if num_replicas is None else gpus * num_replicas}
    if name == "rate_scale":
        row["rate_scale"] = None
    return {**row, "reason": None, "idle": None, "idle_share_in_time": None, "assumptions": {}, "searches": []}


def _search_as_dict(seed: int | None, found: SearchResult, name: str) -> Document:
    answer = found.answer if found.answer is None or name == "rate_scale" else int(found.answer)
    tried = {trial.value for trial in found.trials}
    not_run = [number for number in range(1, int(answer or 0)) if number not in tried]  # below the answer
    return {
        "seed": seed,
        name: answer,
        "is_monotone": found.is_monotone,
        "contradictions": [{"met": met, "missed": missed} for met, missed in found.contradictions],
        "safe": found.safe,
        "not_run": not_run if name == "replicas" else [],
        "trials": [trial.as_dict() for trial in found.trials],
    }


def _why_none(found: SearchResult, most: int, name: str, *, is_bounded: bool) -> str:
    if name == "rate_scale":
        slowest = found.trials[0]
        return f"even {slowest.value:g} times the rate is too much: it gave{misses(slowest.verdict.figures)}"
    as_many = ", the GPUs of the best shape" if is_bounded else ""
    return f"needs more than {most:,} replicas{as_many}: {most:,} gave{misses(found.trials[-1].verdict.figures)}"


def _between(found: SearchResult, name: str) -> str:
    missed = [trial.value for trial in found.trials if not trial.met]
    met = [trial.value for trial in found.trials if trial.met]
    if name == "rate_scale":
        low, high = max(met, default=None), min(missed, default=None)
    else:
        low, high = max(missed, default=None), min(met, default=None)
    words = [f"above {low:g}"] if low is not None else []
    words += [f"at most {high:g}"] if high is not None else []
    unit = "times the rate" if name == "rate_scale" else "replicas"
    return f": {' and '.join(words)} {unit}" if words else ""

"""The answer of `kvledger size` in words and figures: what keeps the SLO, what it costs, what it rests on."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .size_question import SizeQuestion
from .slo import Slo

HOURS_A_MONTH = 730
# Of the requests that an idle engine can serve in time, the share that a fleet is asked to serve in time.
SHARE_OF_THOSE_WHO_CAN = 0.99


def answer_of(question: SizeQuestion, best: Mapping[str, Any], trace: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of the best shape."""
    gpu = question.scenario.gpu
    out: dict[str, Any] = {
        "sentence": "",
        "gpu": gpu,
        "gpus": best["gpus"] if gpu else None,
        "replicas": best["replicas"],
        "tensor_parallel_size": best["tensor_parallel_size"],
    }
    if "rate_scale" in best:
        out["rate_scale"] = best["rate_scale"]
        out["requests_per_s"] = _requests_per_s(best["rate_scale"], trace)
        out["sentence"] = _rate_sentence(question, best, out["requests_per_s"])
    else:
        out["sentence"] = _fleet_sentence(question, best)
    out["sentence"] += "".join(_doubts(best))
    out["cost"] = _cost(question, best)
    return out


def promises(slo: Slo) -> str:
    """`p99 TTFT within 2 s and p99 TPOT within 0.1 s`."""
    words: list[str] = []
    if slo.ttft_p99_s is not None:
        words.append(f"p99 TTFT within {slo.ttft_p99_s:g} s")
    if slo.tpot_p99_s is not None:
        words.append(f"p99 TPOT within {slo.tpot_p99_s:g} s")
    if slo.goodput_share is not None:
        limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s}
        each = " and ".join(f"{name} within {limit:g} s" for name, limit in limits.items() if limit is not None)
        words.append(f"{each} for {slo.goodput_share * 100:g} % of the requests")
    return " and ".join(words)


def misses(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """What an SLO's figures miss, with the limits."""
    names = {"ttft_p99_s": "p99 TTFT", "tpot_p99_s": "p99 TPOT", "goodput_share": "goodput share"}
    parts = [
        f" {names[name]} {'missed' if figure['value'] is None else format(figure['value'], '.4g')}"
        f"{'' if name == 'goodput_share' or figure['value'] is None else ' s'} (limit {figure['limit']:g})"
        for name, figure in figures.items()
        if not figure["met"]
    ]
    return ",".join(parts)


def slo_of_feasible_requests(slo: Slo, shapes: Sequence[Mapping[str, Any]]) -> Slo | None:
    """The same limits for nearly as many requests as an idle engine serves in time; None where that is not the reason.

    It is asked where every shape that has a pool misses the SLO even on an idle engine.
    """
    planned = [shape for shape in shapes if shape["num_gpu_blocks"] is not None]
    if slo.goodput_share is not None or not planned or any(shape["searches"] for shape in planned):
        return None
    shares = [shape["idle_share_in_time"] for shape in planned if shape["idle_share_in_time"]]
    if not shares:
        return None
    share = math.floor(1000 * SHARE_OF_THOSE_WHO_CAN * max(shares)) / 1000
    return Slo(goodput_share=share, ttft_s=slo.ttft_p99_s, tpot_s=slo.tpot_p99_s) if share > 0 else None


def assumptions_of_answer(
    best: Mapping[str, Any] | None, shapes: Sequence[Mapping[str, Any]], name: str
) -> dict[str, Any]:
    """What the answer rests on: where the pool comes from, and those of the run that is the answer.

    Without an answer, those of the last shape that has any.
    """
    if best is None:
        described = [shape for shape in shapes if shape["assumptions"]]
        if not described:
            return {}
        runs = [trial for search in described[-1]["searches"] for trial in search["trials"] if "assumptions" in trial]
        return {**described[-1]["assumptions"], **(runs[-1]["assumptions"] if runs else {})}
    run = answer_trial(best, name)
    return {**best["assumptions"], **run["assumptions"]}


def answer_trial(best: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The run that is the answer of a shape."""
    trials = [trial for search in best["searches"] for trial in search["trials"]]
    return next(trial for trial in trials if trial["value"] == best[name] and trial["met"])


def _engine(question: SizeQuestion, best: Mapping[str, Any]) -> str:
    gpu = question.scenario.gpu
    return f"{best['gpus_per_replica']} x {gpu}" if gpu else "one engine"


def _replicas(number: int) -> str:
    return "1 replica" if number == 1 else f"{number:,} replicas"


def _fleet_sentence(question: SizeQuestion, best: Mapping[str, Any]) -> str:
    gpu, replicas = question.scenario.gpu, best["replicas"]
    total = f"{best['gpus']:,} x {gpu}: " if gpu else ""
    keep = "keeps" if replicas == 1 else "each keep"
    return f"{total}{_replicas(replicas)} of {_engine(question, best)} {keep} {promises(question.slo)}"


def _rate_sentence(question: SizeQuestion, best: Mapping[str, Any], per_s: float | None) -> str:
    rate = "" if per_s is None else f", {per_s:,.3g} requests/s,"
    who = f"{_replicas(best['replicas'])} of {_engine(question, best)}"
    serve, keep = ("serves", "keeps") if best["replicas"] == 1 else ("serve", "keep")
    return f"{who} {serve} {best['rate_scale']:.3g} times the traffic{rate} and {keep} {promises(question.slo)}"


def _doubts(best: Mapping[str, Any]) -> list[str]:
    """What the answer must not be told without."""
    doubts: list[str] = []
    for search in best["searches"]:
        if search["is_monotone"]:
            continue
        pair = search["contradictions"][0]
        unit = "times the rate" if "rate_scale" in best else "replicas"
        way = "up to {:.4g}" if "rate_scale" in best else "from {:.4g} on"
        safe = "" if search["safe"] is None else f"; every run {way.format(search['safe'])} kept it"
        doubts.append(
            f" (NOT MONOTONE: {pair['missed']:.4g} {unit} missed it although {pair['met']:.4g} kept it{safe})"
        )
    return doubts[:1]


def _requests_per_s(rate_scale: float, trace: Mapping[str, Any]) -> float | None:
    window = trace["window"]
    span_s = (window["end_s"] - window["start_s"]) / trace["rate_scale"]
    return trace["num_requests"] / span_s * rate_scale if span_s else None


def _cost(question: SizeQuestion, best: Mapping[str, Any]) -> dict[str, float] | None:
    """In the money that the price is in; None without a price."""
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

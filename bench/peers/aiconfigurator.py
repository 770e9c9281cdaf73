"""kvledger beside aiconfigurator on measured serving points: the same rows, in one run.

    python -m bench.peers.aiconfigurator POINTS [--json FILE]

POINTS is a table as `kvledger validate` reads it. Needs aiconfigurator-core 0.12 with its own requirements
(`pip install kvledger[sim,kernels-db]`). Each row's TTFT and TPOT are asked of `kvledger validate`, as it is shipped,
and of aiconfigurator's aggregated serving in its HYBRID mode (measured kernels where it has them, empirical ones
elsewhere). It takes one length of prompts and one budget of prompt tokens a step; the rows draw lengths and state no
budget. So it is asked in four ways: full and mean lengths, a budget of one prompt and of 8,192 tokens.

Our factors were fitted to the public points of vLLM, so on those ours is an error in sample.
"""

import argparse
import csv
import json
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kvledger.sim.measured.validation import ValidateOptions, validate
from kvledger.sim.report.console import console, table

ENGINE = "vllm"
WAYS = {
    f"{lengths} lengths, budget {budget}": (share, tokens)
    for lengths, share in (("full", 1.0), ("mean", 0.9))
    for budget, tokens in (("one prompt", None), ("8,192", 8192))
}
# Names of the table under which aiconfigurator-core ships no config, and those under which it does.
SHIPPED_AS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
}
Errors = tuple[float, float]  # predicted / measured - 1 of TPOT and TTFT


class Aiconfigurator:
    """Answers of aiconfigurator-core; its tables are loaded once for each card."""

    def __init__(self) -> None:
        def part(name: str) -> Any:
            return import_module(f"aiconfigurator_core.sdk.{name}")

        self._config, self._builders, self._models = part("config"), part("config_builders"), part("models")
        self._common, self._tables = part("common"), part("perf_database")
        self._new_backend = part("backends.factory").get_backend
        self._of_card: dict[str, Any] = {}

    def predict(self, row: Mapping[str, str], share: float, budget: int | None) -> tuple[float, float]:
        """TTFT and TPOT in ms of a row of the table, with lengths of that share and so many prompt tokens a step."""
        count = {name: int(row[name] or 1) for name in row if name.endswith("_size") and "fill" not in name}
        tensor, data, experts = (
            count["tp_size"],
            count["attention_dp_size"],
            count["moe_tp_size"] * count["moe_ep_size"],
        )
        if data > 1 and tensor * data != experts:
            tensor //= data  # these rows give the GPUs of a node as tp_size
        elif data == 1 and experts > tensor:
            data = experts // tensor
        over_tensor = tensor * data if experts == 1 else count["moe_tp_size"]
        # gpt-oss is published in mxfp4, which the table calls fp4; its own config says it rightly.
        modes = {} if "gpt-oss" in row["model_path"] else {name: row[name] or None for name in _MODES}
        config = self._builders.build_model_config(
            tensor, count["pp_size"], data, over_tensor, count["moe_ep_size"], **modes
        )
        model = self._models.get_model(SHIPPED_AS.get(row["model_path"], row["model_path"]), config, ENGINE)
        lengths = {name: int(int(row[name]) * share) for name in ("isl", "osl")}
        asked = self._config.RuntimeConfig(batch_size=max(1, count["batch_size"] // data), **lengths)
        backend = self._new_backend(ENGINE)  # one for each answer: it keeps answers without the model in their keys
        tables = self._tables_of(row["system"])
        found = backend.run_agg(model, tables, asked, ctx_tokens=budget or lengths["isl"]).get_result_dict()
        return float(found["ttft"]), float(found["tpot"])

    def _tables_of(self, card: str) -> Any:
        if card not in self._of_card:
            newest = max(self._tables.get_supported_databases()[card][ENGINE])
            found = self._tables.get_database(card, ENGINE, newest, database_mode="HYBRID", shared_layer=True)
            found.set_default_database_mode(self._common.DatabaseMode.HYBRID)
            self._of_card[card] = found
        return self._of_card[card]


_MODES = ("gemm_quant_mode", "moe_quant_mode")


def compare(points: Path) -> dict[str, list[Errors]]:
    """Errors of each side over the rows that both answer, in the order of the rows."""
    result = validate(ValidateOptions(file=str(points)))
    if {each.rests_on for each in result.predictions} != {"kernels"}:
        raise SystemExit("some points have no measured kernels here: pip install 'kvledger[sim,kernels-db]'")
    with points.open(newline="", encoding="utf-8") as lines:
        rows = {row["id"]: row for row in csv.DictReader(lines)}
    theirs = Aiconfigurator()
    found: dict[str, list[Errors]] = {"kvledger": [], **{way: [] for way in WAYS}}
    unanswered: list[str] = []
    for each in result.predictions:
        ttft, tpot = each.errors
        if ttft is None or tpot is None:
            continue
        measured = each.point.ttft_ms, each.point.tpot_ms
        try:
            answers = {way: theirs.predict(rows[each.point.name], *asked) for way, asked in WAYS.items()}
        except Exception as error:
            unanswered.append(f"{each.point.name}: {error}")
            continue
        found["kvledger"].append((tpot, ttft))
        for way, (their_ttft, their_tpot) in answers.items():
            found[way].append((their_tpot / (measured[1] or 1) - 1, their_ttft / (measured[0] or 1) - 1))
    for line in unanswered:
        print("aiconfigurator does not answer", line)
    return found


def figures(errors: Sequence[Errors]) -> Iterator[float]:
    """Mean and median of the absolute errors, and the mean error, of TPOT and then of TTFT."""
    for column in zip(*errors, strict=True):
        sizes = [abs(error) for error in column]
        yield from (statistics.fmean(sizes), statistics.median(sizes), statistics.fmean(column))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("points", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    found = compare(asked.points)
    names = ("mean", "median", "bias")
    columns = ["", "points", *(f"{latency} {name}" for latency in ("TPOT", "TTFT") for name in names)]
    rows: list[tuple[str, ...]] = []
    for side, errors in found.items():
        shown = tuple(
            f"{100 * value:+.1f} %" if i % 3 == 2 else f"{100 * value:.1f} %" for i, value in enumerate(figures(errors))
        )
        rows.append((side, f"{len(errors):,}", *shown))
    console().print(table("Errors of the points that both answer", columns, rows))
    if asked.json is not None:
        asked.json.write_text(
            json.dumps({side: list(figures(errors)) for side, errors in found.items()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

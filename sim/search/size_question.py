"""The question of `kvledger size`: an SLO, the shapes to try, and how to search."""

import math
from typing import Any

import attrs

from ...core.errors import InputError
from ..scenario.engine import Engine
from ..scenario.fleet import RoutingOptions
from ..scenario.options import FLEET, SEARCH, option, options, whole_numbers
from ..scenario.scenario import Scenario
from ..scenario.traffic import open_traffic
from .jobs import SIZE
from .kept import content_of, files_among
from .sizing import FleetSearch, RateSearch, Search, Setting
from .slo import Slo

SIZES_UNLESS_GIVEN = (1, 2, 4, 8)


@options
class SizeOptions(RoutingOptions):
    """The SLO, the fleets to try, and how to search."""

    slo_ttft_p99: float | None = option(None, SEARCH, "99th percentile of TTFT in seconds.")
    slo_tpot_p99: float | None = option(None, SEARCH, "99th percentile of TPOT in seconds.")
    slo_e2e_p99: float | None = option(
        None, SEARCH, "99th percentile of E2E in seconds: from arrival to the last token."
    )
    slo_goodput: float | None = option(
        None, SEARCH, "Share of all requests, refused ones included, that keep --slo-ttft, --slo-tpot and --slo-e2e."
    )
    slo_ttft: float | None = option(None, SEARCH, "TTFT of a single request in seconds, for the goodput.")
    slo_tpot: float | None = option(None, SEARCH, "TPOT of a single request in seconds, for the goodput.")
    slo_e2e: float | None = option(None, SEARCH, "E2E of a single request in seconds, for the goodput.")
    tensor_parallel_sizes: str | None = option(
        None, SEARCH, "GPUs of a replica to try, such as 2,4,8. Unless given: 1,2,4,8 with --model.", metavar="N,..."
    )
    replicas: int | None = option(
        None, FLEET, "Find the highest request rate of this many replicas instead.", least=1, metavar="N"
    )
    max_replicas: int = option(64, SEARCH, "Largest fleet to try.", least=1, metavar="N")
    seeds: int | None = option(
        None, SEARCH, "Number of seeds of a workload; 1 unless given. The worst one counts.", metavar="N"
    )
    probes: int = option(
        1,
        SEARCH,
        "Further runs on either side of the answer, to check that more replicas are better.",
        least=0,
        metavar="N",
    )
    tornado: bool = option(False, SEARCH, "Show how the answer moves with each assumption.", "--tornado")
    jobs: int = option(1, SEARCH, "Processes for the tornado.", least=1, metavar="N")
    keep: str | None = option(
        None, SEARCH, "Folder of finished runs: an interrupted search goes on where it stopped.", metavar="FOLDER"
    )
    price_per_gpu_hour: float | None = option(None, SEARCH, "Price of a GPU hour: gives the answer in money.")

    def __attrs_post_init__(self) -> None:
        _ = self.slo  # refuses none, or a wrong one

    @property
    def slo(self) -> Slo:
        """The SLO to keep."""
        p99 = {"ttft_p99_s": self.slo_ttft_p99, "tpot_p99_s": self.slo_tpot_p99, "e2e_p99_s": self.slo_e2e_p99}
        each = {"ttft_s": self.slo_ttft, "tpot_s": self.slo_tpot, "e2e_s": self.slo_e2e}
        return Slo(**p99, goodput_share=self.slo_goodput, **each)


@attrs.frozen(kw_only=True)
class SizeQuestion:
    """A checked question; `sizes` replace the scenario's tensor-parallel size.

    Raises InputError: an option has no effect on the scenario.
    """

    scenario: Scenario
    asked: SizeOptions

    def __attrs_post_init__(self) -> None:
        asked = self.asked
        if asked.seeds is not None and (asked.seeds < 1 or self.scenario.trace):
            raise InputError(f"--seeds {asked.seeds} has no effect: it must be 1 or more, and a trace file has no seed")
        has_no_rate = self.scenario.input_len is not None and self.scenario.request_rate in (None, math.inf)
        if asked.replicas is not None and has_no_rate:
            raise InputError(f"--replicas {asked.replicas} asks for a rate: give the benchmark a --request-rate")
        if asked.jobs > 1 and not asked.tornado:
            raise InputError(f"--jobs {asked.jobs} has no effect without --tornado; leave it out")
        price = asked.price_per_gpu_hour
        if price is not None and not (0 < price < float("inf") and self.scenario.gpu):
            raise InputError(f"--price-per-gpu-hour is {price}; it must be above 0, and needs --model and --gpu")

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs of a replica to try."""
        text = self.asked.tensor_parallel_sizes
        if text is None:
            return SIZES_UNLESS_GIVEN if self.scenario.model else (1,)
        return tuple(sorted(set(whole_numbers(text, "--tensor-parallel-sizes", "GPUs", "2,4,8", least=1))))

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """Seeds of the workload; (None,) without --seeds."""
        if self.asked.seeds is None:
            return (None,)
        first = self.scenario.seed or 0
        return tuple(range(first, first + self.asked.seeds))

    def search(self, most: int) -> Search:
        """The search for at most `most` replicas, or for the highest rate."""
        if self.asked.replicas is None:
            return FleetSearch(most=most)
        return RateSearch(num_replicas=self.asked.replicas)

    def setting(self, engine: Engine, size: int, seed: int | None) -> Setting:
        """One shape of engine under one seed."""
        asked = self.asked
        return Setting(
            open_trace=lambda: open_traffic(self.scenario, seed),
            parts=engine.parts,
            slo=asked.slo,
            routing=asked.routing,
            routing_load_weight=asked.routing_load_weight,
            data_parallel_size=self.scenario.data_parallel_size,
            event_delay_s=asked.event_delay_s,
            named={} if asked.keep is None else self._named(size, seed),
            kept_in=asked.keep,
        )

    def _named(self, size: int, seed: int | None) -> dict[str, Any]:
        """Everything that a run depends on, in plain values: identifies a kept run."""
        scenario, asked = self.scenario, self.asked
        apart = ("seed", "trace", "data_parallel_size")
        values = {name: getattr(scenario, name) for name in SIZE if name not in apart}
        if scenario.kv_cache_memory_bytes is not None:
            values["kv_cache_memory_bytes"] = str(scenario.kv_cache_memory_bytes)
        return {
            "options": values,
            "content": content_of([*scenario.trace, *files_among(values.values())]),
            "seed": scenario.seed if seed is None else seed,
            "tensor_parallel_size": size,
            "slo": asked.slo.as_dict(),
            "data_parallel_size": scenario.data_parallel_size,
            "routing": [asked.routing, asked.routing_load_weight, asked.event_delay_s],
        }

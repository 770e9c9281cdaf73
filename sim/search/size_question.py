"""What `kvledger size` was asked."""

from pathlib import Path
from typing import Any

import attrs

from ...core.errors import InputError
from ..scenario.engine_options import EngineOptions, open_source
from .sizing import FleetSearch, RateSearch, Search, Setting
from .slo import Slo
from .slo_search import KeptTrials
from .sweep import content_of

SIZES_UNLESS_GIVEN = (1, 2, 4, 8)
# Of the options, these do not change what a run computes.
NOT_OF_A_RUN = ("json", "seed", "trace", "tensor_parallel_size")


@attrs.frozen(kw_only=True)
class SizeQuestion:
    """What `kvledger size` was asked; `given` holds the options of `kvledger replay`.

    Attributes:
        given: option -> value as typed.
        slo: what must be kept.
        tensor_parallel_sizes: as typed; None: those of `SIZES_UNLESS_GIVEN` for a model.
        data_parallel_size: ranks of a replica.
        routing: name of the router.
        routing_load_weight: of prefix-aware routing.
        event_delay_s: from an engine's commit to the router's knowing of it.
        num_replicas: a fleet that is given, whose highest rate is asked for; None: how many replicas?
        max_replicas: where to give up.
        num_seeds: seeds of a workload; None: one.
        num_probes: further runs on either side of the answer.
        with_tornado: whether to ask what would change the answer.
        num_workers: processes for the tornado.
        kept_in: folder of finished runs.
        price_per_gpu_hour: money, in whatever currency.
    """

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
    num_probes: int
    with_tornado: bool
    num_workers: int
    kept_in: str | None
    price_per_gpu_hour: float | None

    def __attrs_post_init__(self) -> None:
        least = {
            "max-replicas": (self.max_replicas, 1),
            "replicas": (self.num_replicas, 1),
            "probes": (self.num_probes, 0),
            "jobs": (self.num_workers, 1),
        }
        for option, (value, bound) in least.items():
            if value is not None and value < bound:
                raise InputError(f"--{option} is {value}; it must be at least {bound}")
        is_drawn = self.given["workload"] is not None or self.given["fit"] is not None
        if self.num_seeds is not None and (self.num_seeds < 1 or not is_drawn):
            raise InputError(
                f"--seeds {self.num_seeds} has no effect: it must be 1 or more, and only a --workload or a --fit is "
                "drawn anew"
            )
        if self.num_workers > 1 and not self.with_tornado:
            raise InputError(f"--jobs {self.num_workers} has no effect without --tornado; leave it out")
        price = self.price_per_gpu_hour
        if price is not None and not (0 < price < float("inf") and self.given["gpu"]):
            raise InputError(f"--price-per-gpu-hour is {price}; it must be above 0, and needs --model and --gpu")

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

    def gpus_per_replica(self, size: int) -> int:
        """GPUs of a replica with a tensor-parallel size."""
        return size * self.given["pipeline_parallel_size"] * self.data_parallel_size

    def search(self, most: int) -> Search:
        """What is looked for; `most` replicas at most."""
        if self.num_replicas is None:
            return FleetSearch(most=most)
        return RateSearch(num_replicas=self.num_replicas)

    def setting(self, engine: EngineOptions, size: int, seed: int | None) -> Setting:
        """One shape of engine under one seed."""
        kept = KeptTrials(None if self.kept_in is None else Path(self.kept_in))
        return Setting(
            open_trace=lambda: open_source(self.given, seed),
            parts=engine.parts,
            slo=self.slo,
            routing=self.routing,
            routing_load_weight=self.routing_load_weight,
            data_parallel_size=self.data_parallel_size,
            event_delay_s=self.event_delay_s,
            named={} if self.kept_in is None else self._named(size, seed),
            kept=kept,
        )

    def _named(self, size: int, seed: int | None) -> dict[str, Any]:
        """Everything that a run depends on, in plain values."""
        files = [*(self.given["trace"] or ()), *(self.given[name] for name in ("fit", "latency_table"))]
        model = self.given["model"]
        files += [model] if model is not None and Path(model).is_file() else []
        return {
            "options": {name: value for name, value in self.given.items() if name not in NOT_OF_A_RUN},
            "content": content_of(name for name in files if name is not None),
            "seed": self.given["seed"] if seed is None else seed,
            "tensor_parallel_size": size,
            "slo": self.slo.as_dict(),
            "data_parallel_size": self.data_parallel_size,
            "routing": [self.routing, self.routing_load_weight, self.event_delay_s],
        }

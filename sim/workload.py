"""Built-in workloads: seeded request streams that resemble public traces, so that a study needs no download."""

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import attrs

from ..core.errors import InputError
from .traces import TraceInfo, TraceRequest, Window
from .traces.trace_format import Row
from .traces.window import check_window, requests_in_window
from .workload_agentic import AgenticParameters, agentic_requests
from .workload_chat import ChatParameters, chat_requests
from .workload_lengths import CodeParameters, ShareGPTParameters, code_requests, sharegpt_requests
from .workload_sessions import SessionRequest

UNITS_PER_SECOND = 1_000


@attrs.frozen
class WorkloadModel:
    """A generator and its parameters. `duration_s` is how long the stream lasts unless told otherwise."""

    name: str
    resembles: str
    parameters: Any
    requests: Callable[[Any, int], Iterator[SessionRequest]]
    duration_s: float
    trace_block_size: int | None


def workload_models() -> dict[str, WorkloadModel]:
    """The built-in workloads by name."""
    chat, agentic = ChatParameters(), AgenticParameters()
    models = (
        WorkloadModel(
            "conversation", "the Mooncake conversation trace (FAST'25)", chat, chat_requests, 3_537.0, chat.block_size
        ),
        WorkloadModel(
            "sharegpt", "ShareGPT at 2 requests/s (SOSP'23)", ShareGPTParameters(), sharegpt_requests, 3_600.0, None
        ),
        WorkloadModel("code", "the Azure 2023 code trace", CodeParameters(), code_requests, 3_436.0, None),
        WorkloadModel(
            "agentic", "24 public coding-agent sessions", agentic, agentic_requests, 3_600.0, agentic.block_size
        ),
    )
    return {model.name: model for model in models}


def open_workload(
    name: str,
    *,
    seed: int = 0,
    duration_s: float | None = None,
    skip_first: int = 0,
    limit: int | None = None,
    rate_scale: float = 1.0,
) -> "Workload":
    """A `Trace` by name; two with one seed are identical, in every process and on every Python version.

    The stream ends after `duration_s` on its own clock (the length of what it resembles unless given) or after `limit`
    requests, whichever comes first. Raises `InputError` for an unknown name or an option out of range.
    """
    models = workload_models()
    if name not in models:
        raise InputError(f"--workload is {name!r}; the built-in ones are {', '.join(models)}")
    check_window(skip_first, limit, rate_scale)
    model = models[name]
    if duration_s is None:
        # Asked for a number of requests and no time, the stream runs until it has them.
        duration_s = model.duration_s if limit is None else float("inf")
    if not duration_s > 0:
        raise InputError(f"the workload's duration is {duration_s} s; it must be above 0")
    return Workload(model, seed, duration_s, Window(skip_first, limit), rate_scale)


class Workload:
    """A `Trace` that is generated as it is read; see `open_workload`."""

    def __init__(self, model: WorkloadModel, seed: int, duration_s: float, window: Window, rate_scale: float) -> None:
        self._model = model
        self._seed = seed
        self._duration_s = duration_s
        self._window = window
        self._rate_scale = rate_scale
        self.info = self._empty_info()

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests of the window, the same ones in every pass."""
        self.info = info = self._empty_info()
        yield from requests_in_window(self._rows(), info, UNITS_PER_SECOND)
        if info.num_requests == 0:
            raise InputError(
                f"--skip-first {self._window.skip_first:,} leaves nothing: workload {self._model.name} holds "
                f"{info.num_rows_read:,} requests in {self._duration_s:g} s"
            )

    def _rows(self) -> Iterator[Row]:
        requests = self._model.requests(self._model.parameters, self._seed)
        in_time = takewhile(lambda request: request[0] < self._duration_s, requests)
        for place, (arrival_s, input_length, output_length, hash_ids) in enumerate(in_time, start=1):
            yield place, round(arrival_s * UNITS_PER_SECOND), input_length, output_length, hash_ids, None, 0

    def _empty_info(self) -> TraceInfo:
        model = self._model
        return TraceInfo(
            name=model.name,
            path=None,
            format="built-in workload",
            timestamp_unit="ms",
            trace_block_size=model.trace_block_size,
            trace_block_size_source=None if model.trace_block_size is None else "the workload's own",
            rate_scale=self._rate_scale,
            window=Window(self._window.skip_first, self._window.limit),
            workload={
                "resembles": model.resembles,
                "seed": self._seed,
                "parameters": attrs.asdict(model.parameters),
            },
        )

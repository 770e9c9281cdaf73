"""Runs a command's job by name, with options as text, and returns its JSON document; used by sweeps."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ...core.errors import InputError, KVLedgerError
from ..figures import Document
from ..scenario.options import OptionSet, read_texts, spelled
from ..scenario.scenario import Scenario

TRACE = (
    *("trace", "workload", "fit", "trace_block_size", "trace_format", "timestamp_unit", "tokenizer", "request_rate"),
    *("on_bad_row", "skip_first", "limit", "rate_scale", "seed"),
)
_NAMES = [field.name for field in attrs.fields(Scenario)]
# One engine on a trace: the fields up to the seed; those after it describe a deployment's memory in more detail.
REPLAY = tuple(_NAMES[: _NAMES.index("seed") + 1])
FLEET = tuple(name for name in REPLAY if name != "n")
# A recorded run has its requests, so options that choose requests do not apply.
RERUN = tuple(name for name in REPLAY if name == "seed" or name not in (*TRACE, "n"))
SIZE = tuple(name for name in FLEET if name not in ("closed_loop", "tensor_parallel_size"))
BLOCK_SIZE = tuple(name for name in REPLAY if name != "block_size")
# Eviction policies are compared on prompts alone, one after the other.
OPTIMUM = (
    *TRACE,
    *("model", "gpu", "num_gpu_blocks_override", "block_size", "gpu_memory_utilization", "tensor_parallel_size"),
    *("pipeline_parallel_size", "quantization", "kv_cache_dtype", "kv_cache_memory_bytes", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "latency", "base_ms", "us_per_prefill_token"),
    *("us_per_decoding_sequence", "latency_table"),
)
CURVE = (*TRACE, "block_size", "model", "kv_cache_dtype")
COMPARE = (
    *(name for name in TRACE if name != "rate_scale"),
    *("num_gpu_blocks_override", "kv_cache_memory_bytes", "model", "kv_cache_dtype", "max_model_len", "block_size"),
    "max_num_seqs",
)
DEPLOYMENT = (
    *("model", "gpu", "total_memory", "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype", "quantization"),
    *("tensor_parallel_size", "pipeline_parallel_size", "enable_prefix_caching", "enforce_eager", "startup_log"),
)
PLAN = (*DEPLOYMENT, "async_scheduling", *_NAMES[_NAMES.index("seed") + 1 :])
STUDY = (*DEPLOYMENT, *(name for name in TRACE if name != "fit"))
SAMPLING = (*(name for name in TRACE if name not in ("request_rate", "rate_scale")), "block_size")


@attrs.frozen(kw_only=True)
class Job:
    """A command that can be swept.

    Attributes:
        name: of the command.
        options: the fields of the scenario that it takes, and its own option classes.
        run: returns the document, given an instance of each option class.
    """

    name: str
    options: tuple[OptionSet, ...]
    run: Callable[..., Document]

    def document(self, texts: Mapping[str, str], files: tuple[str, ...] = ()) -> Document:
        """Run the job with options as typed on a command line.

        Raises:
            InputError: an unknown option or a wrong value.
            DoesNotFitError: the planner's answer is no.
        """
        scenario, *asked = read_texts(self.options, texts, self.name)
        if files:
            scenario = scenario.evolve(trace=files)
        return self.run(scenario, *asked)


def _plan(scenario: Scenario, asked: Any) -> Document:
    from ..scenario.plan import asks_for_explanation, explain_log, plan_scenario

    if asks_for_explanation(scenario, asked):
        return explain_log(scenario, asked).to_dict()
    return plan_scenario(scenario, asked).to_dict()


def _curve(scenario: Scenario, asked: Any) -> Document:
    from ..scenario.curve import curve_of_scenario

    return curve_of_scenario(scenario, asked).to_dict()


def _replay(scenario: Scenario) -> Document:
    from ..scenario.replay import replay_scenario

    return replay_scenario(scenario).to_dict()


def _fleet(scenario: Scenario, asked: Any) -> Document:
    from ..scenario.fleet import replay_fleet_scenario

    return replay_fleet_scenario(scenario, asked).to_dict()


def _compare(scenario: Scenario, asked: Any) -> Document:
    from ..scenario.compare import compare_scenario

    return compare_scenario(scenario, asked).to_dict()


def _size(scenario: Scenario, asked: Any) -> Document:
    from .size_search import SizeStudy

    study = SizeStudy(scenario, asked)
    study.run()
    return study.document()


def _optimum(scenario: Scenario, asked: Any) -> Document:
    from .optimum import optimum_worth

    return optimum_worth(scenario, asked).to_dict()


def job(name: str) -> Job:
    """The job called `name`. Raises InputError if there is none."""
    from ..scenario.compare import CompareOptions
    from ..scenario.curve import CurveOptions
    from ..scenario.fleet import FleetOptions
    from ..scenario.plan import PlanOptions
    from .optimum import OptimumOptions
    from .size_question import SizeOptions

    of = OptionSet.of
    jobs = {
        "replay": ((of(Scenario, REPLAY),), _replay),
        "fleet": ((of(Scenario, (*FLEET, "data_parallel_size")), of(FleetOptions)), _fleet),
        "curve": ((of(Scenario, CURVE), of(CurveOptions)), _curve),
        "compare": ((of(Scenario, COMPARE), of(CompareOptions)), _compare),
        "plan": ((of(Scenario, PLAN), of(PlanOptions)), _plan),
        "size": ((of(Scenario, (*SIZE, "data_parallel_size")), of(SizeOptions)), _size),
        "optimum": ((of(Scenario, OPTIMUM), of(OptimumOptions)), _optimum),
    }
    if name not in jobs:
        raise InputError(f"--command is {name!r}; it is one of {', '.join(jobs)}")
    sets, run = jobs[name]
    return Job(name=name, options=sets, run=run)


def reason(error: KVLedgerError) -> str:
    """An error's message with the options spelled as on the command line."""
    return spelled(str(error), _NAMES)

"""`kvledger optimum`: what a better eviction order could win at most, in tokens, GPU time and money."""

import inspect
from typing import Annotated, Any

import typer

from .fleet import NOT_OF_A_FLEET
from .replay import replay
from .shared_options import takes_options_of

# What an eviction order wins is counted on prompts alone, one after the other.
NOT_OF_AN_ORDER = (
    *NOT_OF_A_FLEET,
    *("enable_prefix_caching", "enable_chunked_prefill", "long_prefill_token_threshold", "scheduling_policy"),
    *("preemption_victim", "watermark_blocks", "eviction", "preemption_mode", "swap_space_blocks", "swap_link_gb_s"),
    *("swap_bytes_per_block", "num_speculative_tokens", "draft_acceptance_rate", "async_scheduling"),
)


@takes_options_of(replay, leave_out=NOT_OF_AN_ORDER)
def optimum(
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="What a GPU costs an hour: the answer in money.")
    ] = None,
    **given: Any,
) -> None:
    """LRU against the optimum, which knows the future, at the pool of one engine: what a better order could win.

    Example: kvledger optimum --workload conversation --model llama-3.1-8b --gpu H100 --price-per-gpu-hour 2.5
    """
    from ..report.comparisons import print_worth
    from ..report.console import print_json
    from ..scenario.engine_options import open_source, read_engine
    from ..search.optimum import optimum_worth

    defaults = {name: option.default for name, option in inspect.signature(replay).parameters.items()}
    options = {**defaults, **given}
    document = optimum_worth(open_source(options), read_engine(options), price_per_gpu_hour).as_dict()
    if given["json"]:
        print_json(document)
    else:
        print_worth(document)

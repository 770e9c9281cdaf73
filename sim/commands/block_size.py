"""`kvledger block-size`: the best block size for a trace on given hardware."""

from typing import Annotated

import typer

from ..scenario.options import OptionSet
from ..scenario.scenario import Scenario
from ..search.jobs import BLOCK_SIZE
from .declare import Jobs, Json, Keep, command


@command(scenario=OptionSet.of(Scenario, BLOCK_SIZE))
def block_size(
    scenario: Scenario,
    block_sizes: Annotated[
        str,
        typer.Option(
            help="Tokens per block to try. A pool given in blocks has blocks of the first size.",
            rich_help_panel="Search",
            metavar="TOKENS,...",
        ),
    ] = "16,32,64,128,256",
    tolerance: Annotated[
        float,
        typer.Option(help="Share by which a figure may be worse than the best of all sizes.", rich_help_panel="Search"),
    ] = 0.01,
    jobs: Jobs = 1,
    keep: Keep = None,
    json: Json = False,
) -> None:
    """Find the largest block size whose hit rate, latencies and output are as good as the best.

    Example: kvledger block-size --workload conversation --model llama-3.1-8b --gpu H100
    """
    from ..report.comparisons import print_block_sizes
    from ..report.console import print_json, progress
    from ..search.block_size import BlockSizeQuestion, block_size_document, parse_block_sizes

    question = BlockSizeQuestion(
        scenario=scenario,
        block_sizes=parse_block_sizes(block_sizes),
        tolerance=tolerance,
        num_workers=jobs,
        kept_in=keep,
    )
    bar, task = progress("Block sizes", total=len(question.block_sizes))
    with bar:
        document = block_size_document(question, on_row=lambda row: bar.advance(task))
    if json:
        print_json(document)
    else:
        print_block_sizes(document)

"""`kvledger block-size`: the best block size for a trace on given hardware."""

from ..scenario.scenario import Scenario
from ..search.block_size import BlockSizeOptions
from ..search.jobs import BLOCK_SIZE
from .declare import Json, command


@command(scenario=BLOCK_SIZE)
def block_size(scenario: Scenario, asked: BlockSizeOptions, json: Json = False) -> None:
    """Find the largest block size whose hit rate, latencies and output are as good as the best.

    Example: kvledger block-size --workload conversation --model llama-3.1-8b --gpu H100
    """
    from ..report.comparisons import print_block_sizes
    from ..report.console import Bar, print_result
    from ..search.block_size import block_size_document

    with Bar("Block sizes", total=len(asked.sizes)) as bar:
        document = block_size_document(scenario, asked, on_row=lambda row: bar.update(advance=1))
    print_result(document, print_block_sizes, json)

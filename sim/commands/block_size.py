"""`kvledger block-size`: the best block size for a trace on given hardware."""

from typing import Annotated, Any

import typer

from .fleet import NOT_OF_A_FLEET
from .replay import replay
from .shared_options import takes_options_of

NOT_OF_SEVERAL_SIZES = (*(name for name in NOT_OF_A_FLEET if name not in ("closed_loop", "n")), "block_size")


@takes_options_of(replay, leave_out=NOT_OF_SEVERAL_SIZES)
def block_size(
    block_sizes: Annotated[
        str, typer.Option(help="Tokens of a block to try. A pool given in blocks is of blocks of the first.")
    ] = "16,32,64,128,256",
    tolerance: Annotated[
        float, typer.Option(help="How much worse than the best figure of any size, as a share, is not noticeable.")
    ] = 0.01,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    keep: Annotated[str | None, typer.Option(help="Folder of finished runs, which are not run again.")] = None,
    **given: Any,
) -> None:
    """Replay a trace at several block sizes: the largest whose hit rate, latencies and output are as good as the best.

    Example: kvledger block-size --workload conversation --model llama-3.1-8b --gpu H100
    """
    from ..report.comparisons import print_block_sizes
    from ..report.console import print_json
    from ..scenario.given_options import option_texts
    from ..search.block_size import BlockSizeQuestion, block_size_document, parse_block_sizes

    document = block_size_document(
        BlockSizeQuestion(
            files=tuple(given["trace"] or ()),
            options=option_texts(given, replay),
            block_sizes=parse_block_sizes(block_sizes),
            tolerance=tolerance,
            num_workers=jobs,
            kept_in=keep,
        )
    )
    if given["json"]:
        print_json(document)
    else:
        print_block_sizes(document)

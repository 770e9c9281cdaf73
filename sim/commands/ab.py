"""`kvledger ab`: two configurations side by side, with what differs explained."""

from typing import Annotated, Any

import typer

from .fleet import NOT_OF_A_FLEET
from .replay import replay
from .shared_options import takes_options_of

# Files of one run have no place in a comparison of two.
NOT_OF_TWO = tuple(name for name in NOT_OF_A_FLEET if name not in ("closed_loop", "n"))


@takes_options_of(replay, leave_out=NOT_OF_TWO)
def ab(
    b: Annotated[
        list[str] | None, typer.Option("--b", help="NAME=VALUE: what B has otherwise; give it several times.")
    ] = None,
    a: Annotated[
        list[str] | None, typer.Option("--a", help="NAME=VALUE: what A has otherwise; unless given, the options here.")
    ] = None,
    command: Annotated[
        str, typer.Option(help="What to run: replay, or fleet with its options in --a and --b.")
    ] = "replay",
    **given: Any,
) -> None:
    """Run one trace under two configurations: every figure side by side, what differs, and where it comes from.

    Example: kvledger ab --workload conversation --model llama-3.1-8b --gpu H100 --b kv-cache-dtype=fp8
    """
    from ..report.comparisons import print_ab
    from ..report.console import print_json
    from ..scenario.given_options import option_texts, parse_change
    from ..search.ab import AbQuestion, ab_document

    document = ab_document(
        AbQuestion(
            command=command,
            files=tuple(given["trace"] or ()),
            options=option_texts(given, replay),
            a=dict(parse_change(text, "--a") for text in a or ()),
            b=dict(parse_change(text, "--b") for text in b or ()),
        )
    )
    if given["json"]:
        print_json(document)
    else:
        print_ab(document)

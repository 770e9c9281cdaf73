"""`kvledger ab`: two configurations side by side, with what differs explained."""

from typing import Annotated

import typer

from ..scenario.options import OptionSet
from ..scenario.scenario import Scenario
from ..search.jobs import REPLAY
from .declare import Json, command


@command(scenario=OptionSet.of(Scenario, REPLAY))
def ab(
    scenario: Scenario,
    b: Annotated[
        list[str] | None,
        typer.Option("--b", help="NAME=VALUE: an option that B changes; repeatable.", rich_help_panel="Search"),
    ] = None,
    a: Annotated[
        list[str] | None,
        typer.Option(
            "--a",
            help="NAME=VALUE: an option that A changes; repeatable. Unless given: the options here.",
            rich_help_panel="Search",
        ),
    ] = None,
    command: Annotated[
        str,
        typer.Option(help="What to run: replay, or fleet with its options in --a and --b.", rich_help_panel="Search"),
    ] = "replay",
    json: Json = False,
) -> None:
    """Run one trace under two configurations: every figure side by side, what differs, and why.

    Example: kvledger ab --workload conversation --model llama-3.1-8b --gpu H100 --b kv-cache-dtype=fp8
    """
    from ..report.comparisons import print_ab
    from ..report.console import print_json
    from ..search.ab import AbQuestion, ab_document, parse_change

    document = ab_document(
        AbQuestion(
            command=command,
            scenario=scenario,
            a=dict(parse_change(text, "--a") for text in a or ()),
            b=dict(parse_change(text, "--b") for text in b or ()),
        )
    )
    if json:
        print_json(document)
    else:
        print_ab(document)

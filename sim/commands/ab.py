"""`kvledger ab`: two configurations side by side, with what differs explained."""

from ..scenario.options import SEARCH, option, options
from ..scenario.scenario import Scenario
from ..search.jobs import REPLAY, parse_setting
from .declare import Json, command


@options
class AbOptions:
    """What to run, and what the two sides change."""

    b: tuple[str, ...] = option((), SEARCH, "NAME=VALUE: an option that B changes; repeatable.", "--b")
    a: tuple[str, ...] = option(
        (), SEARCH, "NAME=VALUE: an option that A changes; repeatable. Unless given: the options here.", "--a"
    )
    command: str = option("replay", SEARCH, "What to run: replay, or fleet with its options in --a and --b.")


@command(scenario=REPLAY)
def ab(scenario: Scenario, asked: AbOptions, json: Json = False) -> None:
    """Run one trace under two configurations: every figure side by side, what differs, and why.

    Example: kvledger ab --workload conversation --model llama-3.1-8b --gpu H100 --b kv-cache-dtype=fp8
    """
    from ..report.comparisons import print_ab
    from ..report.console import print_result
    from ..search.ab import AbQuestion, ab_document

    example = "kv-cache-dtype=fp8 (NAME=default resets an option)"
    a, b = (dict(parse_setting(text, f"--{side}", example) for text in getattr(asked, side)) for side in "ab")
    document = ab_document(AbQuestion(command=asked.command, scenario=scenario, a=a, b=b))
    print_result(document, print_ab, json)

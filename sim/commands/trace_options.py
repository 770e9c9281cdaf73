"""The options that say which requests a command works on, the same in every command that takes a trace."""

from typing import Annotated

import typer

TraceFiles = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TRACE",
        help="Trace file, gz or plain: Mooncake, Azure, BurstGPT, Vidur, Qwen-Bailian, ShareGPT or a request log; "
        "coding-assistant conversations may be several files or a folder.",
    ),
]
WorkloadName = Annotated[
    str | None,
    typer.Option(
        "--workload",
        help="Instead of a file: conversation, sharegpt, code, agentic or multi-turn; or a mix of them and of files, "
        "such as conversation*0.5+code@2 (half its rate, 2 requests a second).",
    ),
]
FitTo = Annotated[
    str | None,
    typer.Option(
        "--fit",
        help="Instead of a file: a seeded workload fitted to this one; it says how close it is. --limit and "
        "--rate-scale apply to the workload.",
    ),
]
TraceFormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        "--trace-format",
        help="azure, burstgpt, vidur, qwen-bailian, agentic, sharegpt, log or mooncake; by content unless given.",
    ),
]
TimestampUnit = Annotated[
    str | None, typer.Option("--timestamp-unit", help="s, ms, us or ns; the format's own unless given.")
]
TraceBlockSize = Annotated[
    int | None,
    typer.Option("--trace-block-size", help="Tokens that one hash id stands for; the format's own unless given."),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Counts the tokens of a trace of text: a Hugging Face tokenizer.json, or chars:4 for an estimate.",
    ),
]
RequestRate = Annotated[
    float | None,
    typer.Option("--request-rate", help="Arrivals a second (Poisson) of a trace that records no arrivals."),
]
OnBadRow = Annotated[
    str | None,
    typer.Option("--on-bad-row", help="refuse (unless given): stop at a bad row. skip: leave it out and count it."),
]
SkipFirst = Annotated[int, typer.Option("--skip-first", help="Requests to leave out at the start.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Requests to use after those.")]
RateScale = Annotated[
    float, typer.Option("--rate-scale", help="Arrivals this many times as fast; think times are shorter by as much.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of whatever is drawn; 0 unless given.")]

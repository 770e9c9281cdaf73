"""The options of `kvledger follow`; importing them needs no library that reads KV events."""

import attrs

from ...core.errors import InputError
from ..scenario.options import option, options

PANEL = "Options"
REPORT_MODES = ("incremental", "full")


@options
class FollowOptions:
    """What to follow, how often to report, and where to write it."""

    endpoint: str = option(
        attrs.NOTHING, PANEL, "Where KV events are published, such as tcp://host:5557; or a file.", is_argument=True
    )
    replay_endpoint: str | None = option(None, PANEL, "Where missed batches can be asked for.")
    topic: str = option("", PANEL, "Prefix of the topics to follow.")
    snapshots: bool = option(False, PANEL, "The producer gives its whole state on request (kvledger's own does).")
    num_gpu_blocks: int | None = option(
        None, PANEL, "Blocks of the server's pool. Unless given: the most that were seen at once."
    )
    interval: float = option(5.0, PANEL, "Seconds between two lines.")
    duration: float | None = option(None, PANEL, "Seconds to follow; until interrupted unless given.")
    continuation_s: float = option(
        2.0, PANEL, "Blocks right behind a sequence belong to it if they come within so many seconds.", least=0
    )
    kv_cache_report_mode: str = option(
        "incremental", PANEL, "full: the server also reports the blocks that requests found, as stored again."
    )
    record: str | None = option(None, PANEL, "Keep the stream in this file, which can be followed again.")
    trace_out: str | None = option(
        None, PANEL, "Write the requests seen to this file, a Mooncake trace for kvledger curve."
    )
    prometheus_port: int | None = option(None, PANEL, "Serve the figures for Prometheus on this port of 127.0.0.1.")

    def __attrs_post_init__(self) -> None:
        if self.interval <= 0:
            raise InputError(f"--interval is {self.interval}; it must be above 0 seconds")
        if self.kv_cache_report_mode not in REPORT_MODES:
            modes = " or ".join(REPORT_MODES)
            raise InputError(f"--kv-cache-report-mode is {self.kv_cache_report_mode!r}; it must be {modes}")

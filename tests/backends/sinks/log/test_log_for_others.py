"""Other tools read a log with no code of ours: pyarrow, polars and pandas both kinds of segment, DuckDB the closed."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pytest
from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy
from kvledger.core import EventLog


@pytest.fixture(scope="module")
def truth(history_of: Callable) -> EventLog:
    return history_of(seed=8, num_commands=120, keys="int").log


@pytest.fixture(scope="module")
def log_dir(truth: EventLog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Closed segments and an open one that is still being written."""
    directory = tmp_path_factory.mktemp("log") / "my-log"
    durable = DurableLog.create(directory, flush=FlushPolicy(every_commits=2), segment_bytes=60_000)
    for commit in truth:
        durable.apply(commit)
    durable.flush()
    durable._lock_file.release()
    return directory


def event_counts(log: EventLog) -> Counter[str]:
    return Counter(type(event).__name__ for commit in log for event in commit.events)


def test_polars_reads_closed_and_open_segments(log_dir: Path, truth: EventLog) -> None:
    closed = pl.scan_parquet(log_dir / "*.parquet").collect()
    (stream,) = log_dir.glob("*.arrows")
    rows = pl.concat([closed, pl.read_ipc_stream(stream)])
    assert Counter(rows["event"].to_list()) == event_counts(truth)
    taken = rows.filter(pl.col("event") == "BlocksAllocated")["blocks"].explode().to_list()
    assert len(taken) == sum(
        len(e.blocks) for c in truth for e in c.events if type(e).__name__ == "BlocksAllocated" and len(e.blocks)
    )


def test_pyarrow_reads_closed_and_open_segments(log_dir: Path, truth: EventLog) -> None:
    closed = pyarrow.dataset.dataset(sorted(log_dir.glob("*.parquet")), format="parquet").to_table()
    (stream,) = log_dir.glob("*.arrows")
    with pa.memory_map(str(stream)) as file:
        rows = pa.concat_tables(
            [closed.replace_schema_metadata(), pa.ipc.open_stream(file).read_all().replace_schema_metadata()]
        )
    assert Counter(rows.column("event").to_pylist()) == event_counts(truth)
    assert rows.column("commit").to_pylist() == sorted(rows.column("commit").to_pylist())


def test_pandas_reads_closed_and_open_segments(log_dir: Path, truth: EventLog) -> None:
    (stream,) = log_dir.glob("*.arrows")
    with pa.memory_map(str(stream)) as file:
        frames = [*map(pd.read_parquet, sorted(log_dir.glob("*.parquet"))), pa.ipc.open_stream(file).read_pandas()]
    assert Counter(pd.concat(frames)["event"]) == event_counts(truth)


def test_duckdb_reads_closed_segments(log_dir: Path) -> None:
    rows = duckdb.sql(f"SELECT event, count(*), sum(len(blocks)) FROM '{log_dir}/*.parquet' GROUP BY event").fetchall()
    expected = pl.scan_parquet(log_dir / "*.parquet").group_by("event").len().collect()
    assert {name: count for name, count, _ in rows} == dict(expected.iter_rows())
    keys = duckdb.sql(f"SELECT decode(unnest(keys)) FROM '{log_dir}/*.parquet' WHERE event = 'BlocksCached'").fetchall()
    assert all(key.startswith("i") and int(key[1:]) for (key,) in keys), "a key of an int is its decimal digits"


def test_an_open_segment_that_ends_in_the_middle_of_a_batch_is_read_up_to_it(log_dir: Path, tmp_path: Path) -> None:
    (stream,) = log_dir.glob("*.arrows")
    torn = tmp_path / "torn.arrows"
    torn.write_bytes(stream.read_bytes()[:-100])
    with pa.memory_map(str(torn)) as file:
        reader, num_rows = pa.ipc.open_stream(file), 0
        with pytest.raises((pa.ArrowInvalid, OSError)):
            while True:
                num_rows += reader.read_next_batch().num_rows
    assert num_rows > 0

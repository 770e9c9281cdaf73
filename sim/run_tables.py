"""Tables of a run: one row a finished request, and occupancy over time."""

import attrs

from ..core.scheduler import Scheduler
from .metrics import SERIES
from .request_record import RequestRecord
from .run_histograms import NANOSECONDS
from .run_listener import RunListener
from .table_writer import Columns, TableWriter

REQUEST_COLUMNS: Columns = {
    field.name: float if field.name.endswith("_s") else int if field.name.startswith("num_") else str
    for field in attrs.fields(RequestRecord)
}
# In a fleet: which engine a row is of; a request's is the one that it finished on.
ENGINE_COLUMN: Columns = {"engine": str}
SERIES_COLUMNS: Columns = {"time_s": float, SERIES[0]: float, SERIES[1]: int, SERIES[2]: int}


class RequestTable:
    """Writes the record of each request as it finishes, in that order."""

    def __init__(self, table: TableWriter) -> None:
        self._table = table

    def add(self, record: RequestRecord) -> None:
        """Write one row."""
        self._table.write([getattr(record, name) for name in REQUEST_COLUMNS])

    def add_of_engine(self, engine: str, record: RequestRecord) -> None:
        """Write one row of a fleet's table, which has `ENGINE_COLUMN` first."""
        self._table.write([engine, *(getattr(record, name) for name in REQUEST_COLUMNS)])


class SeriesTable(RunListener):
    """Writes usage of the pool, running and waiting requests at every scheduling decision, none left out.

    Several identical decode steps may be taken in one decision; their blocks are counted from its start on.
    """

    def __init__(self, table: TableWriter, engine: str | None = None) -> None:
        """Write to a table; with the name of an engine, to one that has `ENGINE_COLUMN` first."""
        self._table = table
        self._first = [] if engine is None else [engine]

    def scheduled(self, now_ns: int, scheduler: Scheduler) -> None:
        """Write one row."""
        usage = scheduler.allocator.pool.usage
        self._table.write([*self._first, now_ns / NANOSECONDS, usage, scheduler.num_running, scheduler.num_waiting])

"""Finds timestamps that fit another unit better than the one in which they are read (field report G02).

Formats with the same fields are written in different units, and lengths and ids do not tell which one it is.
"""

from datetime import UTC, datetime

from .trace import UNITS_PER_SECOND, TraceInfo

# A time since 1970 is taken for a date of these years: requests to language models, with room on both sides.
FIRST_DATE_S = 946_684_800  # 2000-01-01
LAST_DATE_S = 4_102_444_800  # 2100-01-01


class UnitDoubts:
    """Remarks on one pass over a trace whose unit was assumed, not given."""

    def __init__(self, info: TraceInfo, unit: str) -> None:
        """`unit` is a key of UNITS_PER_SECOND; remarks are added to `info`."""
        self._info = info
        self._unit = unit
        self._has_begun = False
        self._fraction = (
            f"timestamps have a fraction, finer than the {unit} in which this format is read. If the file is in "
            f"another unit, give it: --timestamp-unit s (--timestamp-unit {unit} confirms {unit})"
        )

    def check(self, when: int | float) -> None:
        """Look at the next timestamp, in the unit."""
        if not self._has_begun:
            self._has_begun = True
            self._check_date(when)
        # Seconds have fractions in most files.
        if self._unit != "s" and type(when) is float and when % 1:
            self._info.remark(self._fraction)

    def _check_date(self, when: int | float) -> None:
        if when / UNITS_PER_SECOND[self._unit] >= FIRST_DATE_S:
            return
        for unit, units_per_second in UNITS_PER_SECOND.items():
            if FIRST_DATE_S <= when / units_per_second < LAST_DATE_S:
                self._info.remark(
                    f"timestamp (the first), {when:,}, is read in {self._unit}, which is "
                    f"{_date(when / UNITS_PER_SECOND[self._unit])} if it counts from 1970; in {unit} it is "
                    f"{_date(when / units_per_second)}. Name the unit: --timestamp-unit {unit} or {self._unit}"
                )
                return


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"

"""Tools for event logs: record, verify, diff, convert, run again; and the shadow ledger of a followed server."""

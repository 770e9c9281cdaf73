"""The ledger: state as the fold of events, the log in memory, and the checks and audits of a log."""

"""Every error that a user can meet. Each message says what was given, where, what was expected, and what to do."""


class KVLedgerError(Exception):
    """Base of all errors raised on purpose by kvledger."""


class InputError(KVLedgerError, ValueError):
    """What the user gave is wrong (a value, a file, a line). The command line exits with 2."""


class DoesNotFitError(KVLedgerError):
    """The question was understood and the answer is no: it does not fit. The command line exits with 1."""


class MisuseError(KVLedgerError, RuntimeError):
    """A caller of the library broke a rule (double free, stale match, unknown id). Nothing has changed."""


class CorruptLedgerError(KVLedgerError):
    """Events that do not add up: a log that cannot be replayed, or a state that breaks an invariant."""

"""What a live engine answers when it cannot take or finish a request."""

from ...core.errors import KVLedgerError


class QueueFullError(KVLedgerError):
    """Back-pressure: as many requests as allowed wait for their first step. Nothing has changed; try again later."""


class EngineStoppedError(KVLedgerError):
    """The engine was shut down, or is shutting down, and takes no more requests."""


class EngineFailedError(KVLedgerError):
    """The engine met an error that it cannot go on after; its cause is `__cause__`. Every request ended with it."""

"""What a live engine answers when it cannot take or finish a request."""

from ...core.errors import InputError, KVLedgerError


class QueueFullError(KVLedgerError):
    """Back-pressure: as many requests as allowed wait for their first step. Nothing has changed; try again later."""


class EngineStoppedError(KVLedgerError):
    """The engine was shut down, or is shutting down, and takes no more requests."""


class EngineFailedError(KVLedgerError):
    """The engine met an error that it cannot go on after; its cause is `__cause__`. Every request ended with it."""


class SettingError(InputError):
    """A setting of a request that cannot be served.

    Attributes:
        setting: its name, as the field of `SamplingSettings` and of the API.
    """

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting

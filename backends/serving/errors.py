"""Errors of a live engine that cannot take or finish a request."""

from ...core.errors import InputError, KVLedgerError


class QueueFullError(KVLedgerError):
    """The most allowed requests already wait for their first step. Nothing has changed; try again later."""


class EngineStoppedError(KVLedgerError):
    """The engine was shut down, or is shutting down, and takes no more requests."""


class EngineFailedError(KVLedgerError):
    """The engine failed with the error in `__cause__` and cannot continue. Every request ended with this error."""


class SettingError(InputError):
    """A setting of a request that cannot be served.

    Attributes:
        setting: its name, the same in `SamplingSettings` and the API.
    """

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting

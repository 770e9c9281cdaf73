"""A command that takes another's options too, with the same defaults and help."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

# What `kvledger replay` draws is of one engine; a command that draws has an option of its own.
NOT_SHARED = ("plots",)


def takes_options_of(
    other: Callable[..., None], leave_out: Sequence[str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate `command(*own options, **given)`: the other command's options, but those left out, arrive in `given`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = {p.name for p in own} | set(leave_out) | set(NOT_SHARED)
        shared = [p for p in inspect.signature(other).parameters.values() if p.name not in taken]

        def with_shared_options(**options: Any) -> None:
            command(**options)

        with_shared_options.__doc__ = command.__doc__
        with_shared_options.__name__ = command.__name__
        with_shared_options.__module__ = command.__module__
        # The trace comes first, the command's own options after those it shares.
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*shared, *own)]
        with_shared_options.__dict__["__signature__"] = inspect.Signature(parameters)
        with_shared_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_shared_options

    return decorate

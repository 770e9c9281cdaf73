"""The entry point of vLLM's plug-ins, which vLLM calls in each of its processes."""

import os

RECORD = "KVLEDGER_RECORD"
"""The environment variable that names the directory in which each engine starts a recording."""


def register() -> None:
    """Record every engine of this process, if `KVLEDGER_RECORD` is set.

    vLLM goes on without a plug-in that cannot be loaded, so what hinders a recording is raised when an engine starts.
    """
    if os.environ.get(RECORD):
        from .recorder import install

        install()

"""Runs of a search that are kept in a folder, so that a search that was stopped goes on where it was."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from ..core.errors import InputError
from .slo import Verdict
from .slo_search import Trial

TRIAL_FORMAT = 1


@attrs.frozen
class KeptTrials:
    """Trials by what they compute, each in a file of its own; without a folder nothing is kept."""

    folder: Path | None = None

    def trial(self, named: Mapping[str, Any], run: Callable[[], Trial]) -> Trial:
        """The kept trial of that name, or the one that `run` gives, which is kept then, whole or not at all."""
        if self.folder is None:
            return run()
        path = self.folder / f"{_digest(named)}.json"
        if path.is_file():
            return _read(path)
        trial = run()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
            unfinished.write_text(json.dumps(trial.as_dict(), allow_nan=False), encoding="utf-8")
            os.replace(unfinished, path)
        except OSError as error:
            raise InputError(f"--keep {self.folder}: {error.strerror or error}; give a folder to write to") from None
        return trial


def _digest(named: Mapping[str, Any]) -> str:
    said = json.dumps([TRIAL_FORMAT, named], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _read(path: Path) -> Trial:
    """Raises `InputError` for a file that is no trial."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        verdict = Verdict(met=kept.pop("met"), figures=kept.pop("slo"))
        return Trial(value=kept.pop("value"), verdict=verdict, figures=kept)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path} holds no kept run ({error}); delete it, and it is run again") from None

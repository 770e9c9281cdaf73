"""The main job: plan, curve, compare and replay of one trace on one deployment, as one document.

The parts run one after another, the longest one last. Whatever ends the run early (Ctrl-C, an answer of no), what is
done is kept, and the document names the rest with the reason.
"""

import time
from collections.abc import Callable
from typing import Any

from ...core.deployment.plan import DeploymentPlan
from ...core.errors import DoesNotFitError, InputError
from ..cache.capacity_curve import CapacityCurve
from ..figures import millions
from ..scenario.curve import CurveOptions
from ..scenario.scenario import Scenario
from .answer import answer_as_dict
from .derived import derived_figures
from .next import command_line, next_steps
from .parts import Progress, StudyQuestion, compare_part, curve_part, plan_part, replay_part
from .sentences import answer_sentences
from .what_if import what_if

PARTS = ("plan", "curve", "compare", "replay")
INTERRUPTED = "interrupted before it was done"


class Study:
    """One run of all parts. `document` may be asked for at any moment: it holds what is done by then."""

    def __init__(self, scenario: Scenario, curve: CurveOptions | None = None, progress: Progress | None = None) -> None:
        """Check the question.

        Args:
            scenario: traffic, model, hardware and engine.
            curve: sizes of the curve.
            progress: told how each part proceeds.

        Raises:
            InputError: something is missing, unknown or contradictory.
        """
        self._question = StudyQuestion.of(scenario, curve or CurveOptions())
        self._progress: Progress = progress or (lambda text, completed, total: None)
        self._plan: DeploymentPlan | None = None
        self._curve: CapacityCurve | None = None
        self._parts: dict[str, dict[str, Any]] = {}
        self._timing: dict[str, dict[str, float]] = {}
        self.not_done: dict[str, str] = dict.fromkeys(PARTS, INTERRUPTED)

    @property
    def done(self) -> tuple[str, ...]:
        """The parts whose results are there."""
        return tuple(part for part in PARTS if part in self._parts)

    @property
    def fits(self) -> bool:
        """Whether the deployment serves its longest request; True as long as nobody knows."""
        return self._plan is None or self._plan.fits

    def run(self, on_part: Callable[[str, str | None], None] = lambda part, reason: None) -> None:
        """Run every part.

        Args:
            on_part: hears of each part as it ends: its name, and why it was left out (None: it is done).

        Raises:
            KeyboardInterrupt: passed through; the parts done by then are in `document`.
            InputError: the trace or an option is wrong.
        """
        for part in PARTS:
            started = time.perf_counter()
            reason = self._run_part(part)
            self._timing.setdefault(part, {})["wall_seconds"] = round(time.perf_counter() - started, 4)
            if reason is None:
                del self.not_done[part]
            else:
                self.not_done[part] = reason
            on_part(part, reason)

    def document(self) -> dict[str, Any]:
        """Plain values for JSON; all but `timing` is the same from run to run."""
        question, plan, curve = self._question, self._plan, self._curve
        derived = derived_figures(self._parts, plan)
        document: dict[str, Any] = {
            "title": question.title | _window(self._parts.get("curve")),
            "command": command_line("study", question.scenario, question.curve),
            "answer": None,
            "derived": derived,
            "plan": self._parts.get("plan"),
            "curve": self._parts.get("curve"),
            "replay": self._parts.get("replay"),
            "compare": self._parts.get("compare"),
            "what_if": [] if plan is None or curve is None else what_if(plan, curve, derived["mean_request_tokens"]),
            "next": [],
            "not_done": dict(self.not_done),
            "timing": {**self._timing, "total_seconds": sum(part["wall_seconds"] for part in self._timing.values())},
        }
        document["next"] = next_steps(question.scenario, question.curve, document)
        document["answer"] = answer_as_dict(answer_sentences(document))
        return document

    def _run_part(self, part: str) -> str | None:
        """Keep what the part found; why it was left out, where it was."""
        question = self._question
        if part == "plan":
            self._plan, self._parts[part] = plan_part(question)
        elif part == "curve":
            self._curve, payload = curve_part(question, self._plan, self._progress)
            self._keep(part, payload)
        elif self._plan is None or not self._plan.fits:
            return "the deployment does not fit, so there is no pool to run on"
        else:
            try:
                self._keep(part, self._on_pool(part, self._plan))
            except (DoesNotFitError, InputError) as error:  # the trace was read before: this is about the model
                return str(error)
        return None

    def _on_pool(self, part: str, plan: DeploymentPlan) -> dict[str, Any]:
        if part == "compare":
            return compare_part(self._question, plan, self._progress)
        num_requests = None if self._curve is None else self._curve.info.num_requests
        return replay_part(self._question, plan, num_requests, self._progress)

    def _keep(self, part: str, payload: dict[str, Any]) -> None:
        """The clock's figures stand apart, so that all others are the same from run to run."""
        self._timing[part] = payload.pop("timing", {})
        self._parts[part] = payload


def _window(curve: dict[str, Any] | None) -> dict[str, str]:
    """The part of the trace that was measured: every figure depends on it."""
    if curve is None:
        return {}
    trace, window = curve["trace"], curve["window"]
    return {
        "window": f"{window['num_requests']:,} requests ({window['first_place']:,} to {window['last_place']:,} of the "
        f"trace) over {window['duration_s']:,.0f} s; {millions(trace['input_tokens'])} prompt and "
        f"{millions(trace['output_tokens'])} output tokens"
    }

"""Runs a study: plan, curve, compare and replay of one trace on one deployment, as one document.

The parts run one after another, the longest one last. If the run ends early (Ctrl-C, or nothing fits), the document
keeps the finished parts and gives the reason why the others are missing.
"""

import shlex
import time
from collections.abc import Callable
from typing import Any

from ...core.deployment.plan import DeploymentPlan
from ...core.errors import DoesNotFitError, InputError
from ..cache.capacity_curve import CapacityCurve
from ..figures import Document, millions
from ..scenario.curve import CurveOptions
from ..scenario.options import texts_of
from ..scenario.scenario import Scenario
from ..search.jobs import STUDY, TRACE
from .answer import answer_as_dict, derived_figures, what_if
from .parts import Progress, StudyQuestion, compare_part, curve_part, plan_part, replay_part
from .sentences import answer_sentences

NOT_OF_A_PLAN = (*TRACE, "fit")
POLICIES = "lru,fifo,lfu,s3fifo,sieve,optimum"
MAX_REMEDIES = 3


def command_line(command: str, *asked: Any, **flags: bool) -> str:
    """Writes the shell command (`kvledger study trace.jsonl --model ...`) with every option that is not at its default.

    `asked` are a scenario, then the command's own options; `flags` are further switches, such as `explain=True`.
    """
    words = ["kvledger", command]
    for options in asked:
        words += getattr(options, "trace", ())
        for name, text in texts_of(options).items():
            words += {"yes": [f"--{name}"], "no": [f"--no-{name}"]}.get(text, [f"--{name}", text])
    return shlex.join([*words, *(f"--{name}" for name, given in flags.items() if given)])


def next_steps(scenario: Scenario, capacities: CurveOptions, document: Document) -> list[dict[str, str]]:
    """What to try after a study: a list of `question` and the `command` that answers it."""
    plan = document["plan"]
    of_plan = _only(scenario, lambda name: name not in NOT_OF_A_PLAN)
    explain = {"question": "Why this many blocks?", "command": command_line("plan", of_plan, explain=True)}
    if plan is not None and not plan["fits"]:
        return [*_remedies(scenario, capacities, plan), explain]
    if document["derived"].get("falls_behind") is None:
        return [
            {"question": "How do I finish this study?", "command": command_line("study", scenario, capacities)},
            explain,
        ]
    ranks = 2 * scenario.tensor_parallel_size
    of_curve = _only(scenario, lambda name: name in (*TRACE, "model"))
    twice = ("What happens with twice the traffic?", 2.0)
    half = ("Does the engine keep up with half the traffic?", 0.5)
    traffic, factor = half if document["derived"]["falls_behind"] else twice
    questions = {
        f"What do {ranks * scenario.pipeline_parallel_size} GPUs give?": command_line(
            "study", scenario.evolve(tensor_parallel_size=ranks), capacities
        ),
        traffic: command_line("study", scenario.evolve(rate_scale=scenario.rate_scale * factor), capacities),
        "Which eviction policy serves more?": command_line("curve", of_curve, CurveOptions(policy=POLICIES)),
    }
    return [*({"question": question, "command": command} for question, command in questions.items()), explain]


def _only(scenario: Scenario, is_wanted: Callable[[str], bool]) -> Scenario:
    return Scenario.from_dict({name: value for name, value in scenario.to_dict().items() if is_wanted(name)})


def _remedies(scenario: Scenario, capacities: CurveOptions, plan: Document) -> list[dict[str, str]]:
    """The same study with each option that makes the deployment fit."""
    out: list[dict[str, str]] = []
    for diagnosis in plan["diagnoses"]:
        for remedy in diagnosis["remedies"]:
            name = remedy["option"].removeprefix("--").replace("-", "_")
            if name in STUDY:
                changed = scenario.evolve(**{name: True if remedy["value"] is None else remedy["value"]})
                command = command_line("study", changed, capacities)
                out.append(
                    {"question": f"What happens with {remedy['option']}? ({remedy['cost']})", "command": command}
                )
    return out[:MAX_REMEDIES]


PARTS = ("plan", "curve", "compare", "replay")
INTERRUPTED = "interrupted before it finished"


class Study:
    """Runs all parts. `to_dict` may be called at any time and holds the parts finished so far."""

    def __init__(self, scenario: Scenario, curve: CurveOptions | None = None, progress: Progress | None = None) -> None:
        """Check the options. Raises InputError: something is missing, unknown or contradictory."""
        self._question = StudyQuestion.of(scenario, curve or CurveOptions())
        self._progress: Progress = progress or (lambda text, completed, total: None)
        self._plan: DeploymentPlan | None = None
        self._curve: CapacityCurve | None = None
        self._parts: dict[str, Document] = {}
        self._timing: dict[str, dict[str, float]] = {}
        self.not_done: dict[str, str] = dict.fromkeys(PARTS, INTERRUPTED)

    @property
    def done(self) -> tuple[str, ...]:
        """The finished parts."""
        return tuple(part for part in PARTS if part in self._parts)

    @property
    def fits(self) -> bool:
        """Whether the deployment can serve its longest request; True until the plan is done."""
        return self._plan is None or self._plan.fits

    def run(self, on_part: Callable[[str, str | None], None] = lambda part, reason: None) -> None:
        """Run every part; `on_part` is called when one ends, with its name and why it was skipped (None: it finished).

        Raises:
            KeyboardInterrupt: passed on; `to_dict` has the parts finished by then.
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

    def to_dict(self) -> Document:
        """The JSON document; two runs differ only in `timing`."""
        question, plan, curve = self._question, self._plan, self._curve
        derived = derived_figures(self._parts, plan)
        document: Document = {
            "title": question.title | _window(self._parts.get("curve")),
            "command": command_line("study", question.scenario, question.curve),
            "answer": None,
            "derived": derived,
            **{part: self._parts.get(part) for part in ("plan", "curve", "replay", "compare")},
            "what_if": [] if plan is None or curve is None else what_if(plan, curve, derived["mean_request_tokens"]),
            "next": [],
            "not_done": dict(self.not_done),
            "timing": {**self._timing, "total_seconds": sum(part["wall_seconds"] for part in self._timing.values())},
        }
        document["next"] = next_steps(question.scenario, question.curve, document)
        document["answer"] = answer_as_dict(answer_sentences(document))
        return document

    def _run_part(self, part: str) -> str | None:
        """Run and keep one part; returns the reason if it was skipped."""
        question = self._question
        if part == "plan":
            self._plan, self._parts[part] = plan_part(question)
        elif part == "curve":
            self._curve, payload = curve_part(question, self._plan, self._progress)
            self._keep(part, payload)
        elif self._plan is None or not self._plan.fits:
            return "the deployment does not fit, so it has no pool to run on"
        else:
            num_requests = None if self._curve is None else self._curve.info.num_requests
            try:
                if part == "compare":
                    self._keep(part, compare_part(question, self._plan, self._progress))
                else:
                    self._keep(part, replay_part(question, self._plan, num_requests, self._progress))
            except (DoesNotFitError, InputError) as error:  # about the model: the trace was read before
                return str(error)
        return None

    def _keep(self, part: str, payload: Document) -> None:
        """Move the measured times to `timing`, so that all else is the same in every run."""
        self._timing[part] = payload.pop("timing", {})
        self._parts[part] = payload


def _window(curve: Document | None) -> dict[str, str]:
    """Describes the measured part of the trace, on which every figure depends."""
    if curve is None:
        return {}
    trace, window = curve["trace"], curve["window"]
    return {
        "window": f"{window['num_requests']:,} requests ({window['first_place']:,} to {window['last_place']:,} of the "
        f"trace) over {window['duration_s']:,.0f} s; {millions(trace['input_tokens'])} prompt and "
        f"{millions(trace['output_tokens'])} output tokens"
    }

"""The rule-based state machine: every rule is a command (or a few that belong together), shrunk by Hypothesis."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from kvledger.testing.commands import (
    Abort,
    Allocate,
    Append,
    Command,
    Evict,
    Fork,
    Free,
    Gate,
    Match,
    New,
    Preempt,
    ReleaseBlocks,
    ReleaseOutOfWindow,
    Reset,
    Truncate,
)
from kvledger.testing.differential import SAME_DECISIONS, Differential
from kvledger.testing.failure import KitFailure
from kvledger.testing.protocol import ManagerFactory, supports_of
from kvledger.testing.scenario import Scenario
from kvledger.testing.shorten import shorten
from kvledger.testing.strategies import prompts, scenarios
from kvledger.testing.trial import Trial

SMALL = st.integers(0, 7)
MOST_REQUESTS = 12


class _Plays(Protocol):
    def do(self, command: Command) -> None: ...


@attrs.define
class Played:
    """How much a machine has played, over all its examples."""

    commands: int = 0
    histories: int = 0


def _needs(*capabilities: str) -> Callable[[Any], Any]:
    def have(machine: "AllocatorMachine") -> bool:
        return all(name in machine.trial.capabilities for name in capabilities)

    return precondition(have)


class AllocatorMachine(RuleBasedStateMachine):
    """The rules. `machine_for` makes the subclass that plays them on a manager."""

    trial: Trial
    player: _Plays
    played: Played
    failure: KitFailure | None
    save_to: Path | None = None
    make: ManagerFactory
    rival: ManagerFactory | None = None

    # -- helpers -----------------------------------------------------------------------------------------------------

    @classmethod
    def rival_of(cls, failure: KitFailure) -> ManagerFactory | None:
        """The second manager, if the failure is that the two differ."""
        return cls.rival if failure.violation.name == SAME_DECISIONS.name else None

    def begin(self, player: Trial | Differential) -> None:
        """Start playing."""
        self.trial = player if isinstance(player, Trial) else player.trial
        self.player = player
        self.failure = None
        self.played.histories += 1

    def play(self, command: Command) -> None:
        """Play one command, remembering the failure and saving it."""
        self.played.commands += 1
        try:
            self.player.do(command)
        except KitFailure as failure:
            self.fail(failure)

    def fail(self, failure: KitFailure) -> None:
        """Keep the failure, so that `teardown` leaves the broken manager alone."""
        self.failure = failure
        raise failure

    def teardown(self) -> None:
        """End every request and look for what was lost on the way."""
        if getattr(self, "trial", None) is None or self.failure is not None:
            return
        if isinstance(self.player, Trial):
            try:
                self.player.finish()
            except KitFailure as failure:
                self.fail(failure)

    def has(self, option: str) -> bool:
        """Whether the manager supports an option."""
        return option in self.trial.supports.options

    def name(self, pick: int, live: bool | None = True) -> str | None:
        """One of the requests, live, not live, or any."""
        names = [name for name, request in self.trial.requests.items() if live is None or request.is_live is live]
        return names[pick % len(names)] if names else None

    def limits(self, lookahead: int, reserved: int) -> dict[str, int]:
        """Lookahead and reserve, where the manager knows them; mostly none."""
        return {
            "lookahead": lookahead if self.has("lookahead") and lookahead < 4 else 0,
            "reserved": reserved if self.has("reserved") and reserved < 3 else 0,
        }

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), chunk=SMALL, lookup=st.booleans(), lookahead=SMALL, reserved=SMALL, watermark=st.booleans())
    def admit(
        self, data: st.DataObject, chunk: int, lookup: bool, lookahead: int, reserved: int, watermark: bool
    ) -> None:
        """A request arrives, looks up its prefix, and gets slots for its prompt or a first chunk of it."""
        if len(self.trial.requests) >= MOST_REQUESTS:
            return
        name = f"r{len(self.trial.requests)}"
        prompt = data.draw(prompts(self.trial.scenario))
        self.play(New(name, prompt))
        if lookup and "match" in self.trial.capabilities:
            self.play(Match(name))
        self.allocate_rest(name, chunk, lookup, lookahead, reserved, watermark)

    @rule(pick=SMALL, chunk=SMALL, adopt=st.booleans(), lookahead=SMALL, reserved=SMALL, watermark=st.booleans())
    def admit_with_an_earlier_lookup(
        self, pick: int, chunk: int, adopt: bool, lookahead: int, reserved: int, watermark: bool
    ) -> None:
        """A request that holds nothing is allocated with what it found whenever it looked last, or with nothing."""
        name = self.name(pick, live=False)
        if name is not None:
            self.allocate_rest(name, chunk, adopt, lookahead, reserved, watermark)

    def allocate_rest(self, name: str, chunk: int, adopt: bool, lookahead: int, reserved: int, watermark: bool) -> None:
        """Slots for what is left of the known tokens (a part of it if `chunk` is small)."""
        request = self.trial.requests.get(name)
        if request is None:  # a waived promise has stopped the history
            return
        adopt = adopt and request.found is not None
        hit = request.found.num_hit_tokens if adopt and request.found else 0
        left = max(len(request.tokens) - request.num_valid - hit, 1)
        use_watermark = watermark and self.has("watermark")
        new = left if chunk > 2 else min(left, (chunk + 1) * 5)
        limits = self.limits(lookahead, reserved)
        self.play(Allocate(name, new, adopt=adopt, use_watermark=use_watermark, **limits))

    @_needs("match")
    @rule(pick=SMALL)
    def look_up(self, pick: int) -> None:
        """A lookup whose result is used later, or never."""
        name = self.name(pick, live=None)
        if name is not None:
            self.play(Match(name))

    @_needs("match")
    @rule(data=st.data())
    def arrive_and_look_up(self, data: st.DataObject) -> None:
        """A request arrives, looks, and waits."""
        if len(self.trial.requests) < MOST_REQUESTS:
            name = f"r{len(self.trial.requests)}"
            self.play(New(name, data.draw(prompts(self.trial.scenario))))
            self.play(Match(name))

    @rule(
        picks=st.lists(SMALL, min_size=1, max_size=4),
        output=st.integers(0, 2),
        drafts=SMALL,
        accepted=SMALL,
        lookahead=SMALL,
        reserved=SMALL,
    )
    def decode(self, picks: list[int], output: int, drafts: int, accepted: int, lookahead: int, reserved: int) -> None:
        """A decode step of some live requests."""
        live = self.trial.live()
        names = tuple(dict.fromkeys([live[pick % len(live)] for pick in picks])) if live else ()
        if names:
            num_drafts = drafts if self.has("drafts") and drafts < 6 else 0
            limits = self.limits(lookahead, reserved)
            self.play(Append(names, output, accepted if accepted < 4 else 0, num_drafts, **limits))

    @rule(output=st.integers(0, 2), times=st.integers(2, 6))
    def decode_all_for_a_while(self, output: int, times: int) -> None:
        """Several decode steps of everybody."""
        for _ in range(times):
            if self.trial.live():
                self.play(Append(tuple(self.trial.live()), output))

    @rule(pick=SMALL, chunk=SMALL, back=st.integers(0, 40), lookahead=SMALL, reserved=SMALL)
    def go_on(self, pick: int, chunk: int, back: int, lookahead: int, reserved: int) -> None:
        """The next chunk of a prefill, or a recomputation from further back."""
        name = self.name(pick)
        if name is not None:
            back = back if back < 12 and self.has("rollback") else 0
            request = self.trial.requests[name]
            left = len(request.tokens) - max(request.num_valid - back, 0)
            if left > 0:
                new = min(left, chunk * 4 + 1)
                self.play(Allocate(name, new, back=back, **self.limits(lookahead, reserved)))

    @_needs("can_admit")
    @rule(pick=SMALL, adopt=st.booleans(), watermark=st.booleans())
    def ask_the_gate(self, pick: int, adopt: bool, watermark: bool) -> None:
        """Whether a whole sequence would fit now."""
        name = self.name(pick, live=None)
        if name is not None:
            adopt = adopt and self.trial.requests[name].found is not None
            self.play(Gate(name, adopt, watermark and self.has("watermark")))

    @_needs("release_out_of_window")
    @rule(pick=SMALL)
    def release_out_of_window(self, pick: int) -> None:
        """What fell out of the window comes back."""
        name = self.name(pick)
        if name is not None and not all(group.attends_to_all for group in self.trial.scenario.groups):
            self.play(ReleaseOutOfWindow(name))

    @_needs("truncate")
    @rule(pick=SMALL, share=st.integers(0, 10), forget=st.booleans())
    def truncate(self, pick: int, share: int, forget: bool) -> None:
        """A crop, or rejected drafts, at a tenth of the placed tokens."""
        name = self.name(pick)
        if name is not None:
            num_placed = len(self.trial.requests[name].placed)
            self.play(Truncate(name, num_placed * share // 10, forget))

    @_needs("fork")
    @rule(pick=SMALL)
    def fork(self, pick: int) -> None:
        """A child that shares what its parent has placed."""
        name = self.name(pick)
        if name is not None and len(self.trial.requests) < MOST_REQUESTS:
            self.play(Fork(name, f"r{len(self.trial.requests)}"))

    @rule(pick=SMALL)
    def finish(self, pick: int) -> None:
        """A request ends; sometimes it has ended before."""
        name = self.name(pick, live=True if pick else None)
        if name is not None:
            self.play(Free(name))

    @_needs("preempt")
    @rule(pick=SMALL)
    def preempt(self, pick: int) -> None:
        """A running request gives its blocks back, to come again."""
        name = self.name(pick)
        if name is not None:
            self.play(Preempt(name))

    @_needs("abort")
    @rule(pick=SMALL)
    def abort(self, pick: int) -> None:
        """A request in any state is aborted."""
        name = self.name(pick, live=None)
        if name is not None:
            self.play(Abort(name))

    @_needs("evict")
    @rule(picks=st.lists(st.integers(0, 30), min_size=1, max_size=2))
    def evict(self, picks: Sequence[int]) -> None:
        """Findable blocks are evicted by id."""
        keyed = sorted(self.trial.view.keyed or ())
        if keyed:
            self.play(Evict(tuple(dict.fromkeys([keyed[pick % len(keyed)] for pick in picks]))))

    @_needs("reset")
    @rule(idle=st.booleans())
    def reset(self, idle: bool) -> None:
        """The prefix cache is reset, in use or after everybody has ended."""
        if idle:
            for name in self.trial.live():
                self.play(Free(name))
        self.play(Reset())

    @_needs("release_blocks")
    @rule(pick=st.integers(0, 30), unknown=SMALL)
    def misuse_the_pool(self, pick: int, unknown: int) -> None:
        """A block is released once more than it is held; sometimes it is the null block, or none at all."""
        view = self.trial.view
        if unknown == 0:
            self.play(ReleaseBlocks((view.num_blocks + pick,)))
        elif unknown == 1 and view.null_block is not None:
            self.play(ReleaseBlocks((view.null_block,)))
        else:
            block = 1 + pick % (view.num_blocks - 1)
            self.play(ReleaseBlocks((block,) * (int(view.uses()[block]) + 1)))


def machine_for(
    make: ManagerFactory,
    scenario_strategy: st.SearchStrategy[Scenario] | None = None,
    rival: ManagerFactory | None = None,
    save_to: Path | None = None,
) -> type[AllocatorMachine]:
    """A state machine that plays histories on the managers that `make` makes.

    Args:
        make: the factory; what it supports bounds the histories.
        scenario_strategy: which scenarios; by default all that the factory supports.
        rival: a second factory; where it supports the scenario too, both must decide alike.
        save_to: a folder for regression files of what is found.
    """
    chosen = scenario_strategy if scenario_strategy is not None else scenarios(supports_of(make))

    class Machine(AllocatorMachine):
        played = Played()

        @initialize(scenario=chosen)
        def start(self, scenario: Scenario) -> None:
            if rival is not None and supports_of(rival).allows(scenario):
                self.begin(Differential(make, rival, scenario))
            else:
                self.begin(Trial(make, scenario))

    # Assigned here, since a function in a class body would become a method.
    Machine.make, Machine.rival, Machine.save_to = staticmethod(make), rival and staticmethod(rival), save_to
    Machine.__name__ = Machine.__qualname__ = f"Machine[{getattr(make, '__name__', 'manager')}]"
    return Machine


def run_machine(
    machine: type[AllocatorMachine],
    max_examples: int = 50,
    steps: int = 30,
    derandomize: bool = True,
    shorten_s: float = 10.0,
) -> Played:
    """Play histories until one fails or `max_examples` have been played.

    Hypothesis looks for a failure; `shorten` makes it short, because leaving out commands of a recorded history takes
    milliseconds where shrinking the choices that led to it takes minutes.

    Raises:
        KitFailure: a short failing history; saved, if the machine has a folder for that.
    """
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=steps,
                phases=(Phase.explicit, Phase.generate),
                derandomize=derandomize,
                database=None,
                deadline=None,
                print_blob=False,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except KitFailure as failure:
        short = shorten(failure, machine.make, machine.rival_of(failure), shorten_s)
        if machine.save_to is not None:
            short.save_to(machine.save_to)
        raise short from None
    return machine.played

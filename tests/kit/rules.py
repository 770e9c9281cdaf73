"""The rules of a history: what may happen next. Each is a command or a few that belong together.

Hypothesis draws them one by one (`machine.py`); `explore.py` draws them by their weights. Both share these functions,
so both find the same faults.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeAlias

import attrs
from kvledger.testing.choices import Chooser, chance, choose_prompt, near_blocks, pick
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
from kvledger.testing.trial import Trial
from kvledger.testing.trial_state import TrialRequest

MOST_REQUESTS = 16

Do: TypeAlias = Callable[[Command], None]


@attrs.frozen
class Rule:
    """One rule.

    Attributes:
        name: its name.
        act: plays commands through `do`, looking at the trial and choosing as it goes; nothing if it cannot apply.
        weight: how often it is drawn at random.
        needs: capabilities without which it never applies.
    """

    name: str
    act: Callable[[Trial, Chooser, Do], None]
    weight: int
    needs: tuple[str, ...] = ()


def _named(trial: Trial, chooser: Chooser, live: bool | None) -> TrialRequest | None:
    """One of the requests: live ones, those that hold nothing, or any."""
    requests = [request for request in trial.requests.values() if live is None or request.is_live is live]
    return pick(chooser, requests) if requests else None


def _has(trial: Trial, option: str) -> bool:
    return option in trial.supports.options


def _releases(trial: Trial) -> bool:
    has_windows = not all(group.attends_to_all for group in trial.scenario.groups)
    return has_windows and "release_out_of_window" in trial.capabilities


def _lookahead(trial: Trial, chooser: Chooser) -> int:
    return chooser.integer(1, 4) if _has(trial, "lookahead") and chance(chooser, 4) else 0


def _reserved(trial: Trial, chooser: Chooser) -> int:
    return chooser.integer(1, 3) if _has(trial, "reserved") and chance(chooser, 4) else 0


def _arrive(trial: Trial, chooser: Chooser, do: Do) -> TrialRequest | None:
    """A request arrives, unless there are enough."""
    name = f"r{len(trial.requests)}"
    if len(trial.requests) < MOST_REQUESTS:
        do(New(name, choose_prompt(chooser, trial.scenario)))
    return trial.requests.get(name)


def _allocate(trial: Trial, chooser: Chooser, do: Do, request: TrialRequest, adopt: bool) -> None:
    """Slots for the rest of a request's known tokens, or for a part of it."""
    hit = request.found.num_hit_tokens if adopt and request.found else 0
    left = max(len(request.tokens) - request.num_valid - hit, 1)
    new = chooser.integer(1, left) if chance(chooser, 3) else left
    watermark = _has(trial, "watermark") and chance(chooser, 2)
    lookahead, reserved = _lookahead(trial, chooser), _reserved(trial, chooser)
    external = chooser.integer(1, 20) if _has(trial, "external") and chance(chooser, 6) else 0
    if external and _has(trial, "async_loads") and not request.is_live and chance(chooser, 3):
        new = 0
    do(Allocate(request.name, new, adopt and request.found is not None, 0, lookahead, reserved, watermark, external))


def admit(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A request arrives, looks up its prefix (mostly), and gets slots for its prompt or a first chunk of it."""
    request = _arrive(trial, chooser, do)
    if request is not None:
        adopt = "match" in trial.capabilities and not chance(chooser, 5)
        if adopt:
            do(Match(request.name))
        _allocate(trial, chooser, do, request, adopt)


def _arrive_with(trial: Trial, do: Do, tokens: Sequence[int]) -> TrialRequest | None:
    """A request with these tokens arrives, unless there are enough."""
    name = f"r{len(trial.requests)}"
    if tokens and len(trial.requests) < MOST_REQUESTS:
        do(New(name, [(token, len(list(run))) for token, run in groupby(tokens)]))
    return trial.requests.get(name)


def _arrive_again(trial: Trial, do: Do, twin: TrialRequest | None) -> TrialRequest | None:
    """A request with all the tokens of an earlier one arrives, unless there are enough."""
    return _arrive_with(trial, do, twin.tokens if twin is not None else ())


def branch_off(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A request begins like an earlier one, goes on in its own way, and looks up what they share."""
    other = _named(trial, chooser, live=None)
    if other is None:
        return
    size = max([group.block_size for group in trial.scenario.groups])
    shared = other.tokens[: near_blocks(chooser, size, 4)]
    room = trial.scenario.max_model_len - len(shared)
    tail = [chooser.integer(0, 2)] * min(near_blocks(chooser, size, 2), room)
    request = _arrive_with(trial, do, [*shared, *tail])
    if request is not None:
        do(Match(request.name))
        _allocate(trial, chooser, do, request, adopt=True)


def admit_the_same_again(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A request with all the tokens of an earlier one, or two; without a lookup their blocks are duplicates."""
    twin = _named(trial, chooser, live=None)
    for _ in range(chooser.integer(1, 2)):
        request = _arrive_again(trial, do, twin)
        if request is not None:
            adopt = "match" in trial.capabilities and chance(chooser, 3)
            if adopt:
                do(Match(request.name))
            _allocate(trial, chooser, do, request, adopt)


def arrive_and_look_up(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A request arrives, looks, and waits; half of them have the tokens of one that runs."""
    twin = _named(trial, chooser, live=True) if chance(chooser, 2) else None
    request = _arrive_again(trial, do, twin) if twin else _arrive(trial, chooser, do)
    if request is not None:
        do(Match(request.name))


def admit_later(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A request that holds nothing is allocated with what it found whenever it looked last, or with nothing."""
    request = _named(trial, chooser, live=False)
    if request is not None:
        _allocate(trial, chooser, do, request, adopt=not chance(chooser, 4))


def look_up(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A lookup whose result is used later, or never."""
    request = _named(trial, chooser, live=None)
    if request is not None:
        do(Match(request.name))


def be_overtaken(trial: Trial, chooser: Chooser, do: Do) -> None:
    """What a request found may be taken or evicted by the one command before it is allocated."""
    request = _arrive_again(trial, do, _named(trial, chooser, live=None))
    if request is None or len(trial.requests) >= MOST_REQUESTS:
        return
    do(Match(request.name))
    hit = request.found.num_hit_tokens if request.found else 0
    keyed = sorted(trial.view.keyed or ())
    if keyed and "evict" in trial.capabilities and chance(chooser, 3):
        do(Evict((pick(chooser, keyed),)))
    else:
        other, free = f"r{len(trial.requests)}", len(trial.view.free)
        room = min(max(free, 1) * trial.scenario.block_size, trial.scenario.max_model_len)
        do(New(other, ((3, chooser.integer(1, room)),)))
        do(Allocate(other, room))
    do(Allocate(request.name, max(len(request.tokens) - hit, 1), adopt=request.found is not None))


def run_a_long_one(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A request of nearly the longest length is computed in a few chunks, and decodes up to the last token."""
    room = trial.scenario.max_model_len
    chunk = -(-room // chooser.integer(2, 7))
    name = f"r{len(trial.requests)}"
    if len(trial.requests) < MOST_REQUESTS:
        do(New(name, ((chooser.integer(0, 2), max(room - chooser.integer(1, 4), 1)),)))
    request = trial.requests.get(name)
    while request is not None and (left := len(request.tokens) - request.num_valid) > 0:
        before = request.num_valid
        if request.is_live and _releases(trial):
            do(ReleaseOutOfWindow(name))
        do(Allocate(name, min(chunk, left)))
        if request.num_valid == before:
            return
    for _ in range(3 if request is not None else 0):
        do(Append((name,), 0, 0, 0, _lookahead(trial, chooser)))


def decode(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A decode step of some live requests."""
    live = trial.live()
    if live:
        start, count = chooser.integer(0, len(live) - 1), chooser.integer(1, len(live))
        names = [live[(start + i) % len(live)] for i in range(count)]
        drafts = chooser.integer(1, 5) if _has(trial, "drafts") and chance(chooser, 3) else 0
        accepted = chooser.integer(0, 3) if _has(trial, "drafts") else 0
        output, lookahead, reserved = chooser.integer(0, 2), _lookahead(trial, chooser), _reserved(trial, chooser)
        if chance(chooser, 16):
            names.append(names[0])  # twice in one step, which nobody can place
        do(Append(names, output, accepted, drafts, lookahead, reserved))


def decode_for_a_while(trial: Trial, chooser: Chooser, do: Do) -> None:
    """Several decode steps of everybody."""
    for _ in range(chooser.integer(2, 6)):
        if trial.live():
            do(Append(trial.live(), chooser.integer(0, 2)))


def go_on(trial: Trial, chooser: Chooser, do: Do) -> None:
    """The next chunk of a prefill, or a recomputation from further back."""
    request = _named(trial, chooser, live=True)
    if request is not None:
        back = chooser.integer(0, 12) if _has(trial, "rollback") else 0
        left = len(request.tokens) - max(request.num_valid - back, 0)
        if left > 0:
            new, lookahead, reserved = chooser.integer(1, left), _lookahead(trial, chooser), _reserved(trial, chooser)
            do(Allocate(request.name, new, False, back, lookahead, reserved))


def ask_the_gate(trial: Trial, chooser: Chooser, do: Do) -> None:
    """Whether a whole sequence would fit now."""
    request = _named(trial, chooser, live=None)
    if request is not None:
        watermark = _has(trial, "watermark") and chance(chooser, 2)
        do(Gate(request.name, request.found is not None, watermark, _reserved(trial, chooser)))


def release_out_of_window(trial: Trial, chooser: Chooser, do: Do) -> None:
    """What fell out of the window comes back."""
    request = _named(trial, chooser, live=True)
    if request is not None and _releases(trial):
        do(ReleaseOutOfWindow(request.name))


def truncate(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A crop, or rejected drafts."""
    request = _named(trial, chooser, live=True)
    if request is not None:
        num_tokens = max(len(request.placed) - chooser.integer(0, 12), 0)
        do(Truncate(request.name, num_tokens, forget=chance(chooser, 2)))


def fork(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A child that shares what its parent has placed; now and then one that runs already, or of a parent that ended."""
    request = _named(trial, chooser, live=None if chance(chooser, 6) else True)
    if request is not None and len(trial.requests) < MOST_REQUESTS:
        runs_already = trial.live() and chance(chooser, 6)
        do(Fork(request.name, pick(chooser, trial.live()) if runs_already else f"r{len(trial.requests)}"))


def fork_and_go_back(trial: Trial, chooser: Chooser, do: Do) -> None:
    """One of two that share blocks decodes, goes back into what they share, and comes forward again in two steps."""
    request = _named(trial, chooser, live=True)
    if request is None or not _has(trial, "rollback") or len(trial.requests) >= MOST_REQUESTS:
        return
    child = f"r{len(trial.requests)}"
    do(Fork(request.name, child))
    one = trial.requests.get(pick(chooser, (request.name, child)))
    if one is not None:
        for _ in range(chooser.integer(1, 4)):
            do(Append((one.name,), chooser.integer(0, 2)))
        do(Allocate(one.name, chooser.integer(1, 3), back=chooser.integer(1, 24)))
        do(Allocate(one.name, max(len(one.tokens) - one.num_valid, 1)))


def fork_and_diverge(trial: Trial, chooser: Chooser, do: Do) -> None:
    """Two children, and each of the family goes its own way at once; perhaps behind drafts that all of them accept."""
    request = _named(trial, chooser, live=True)
    if request is not None and len(trial.requests) < MOST_REQUESTS - 1:
        drafts = chooser.integer(1, 5) if _has(trial, "drafts") and chance(chooser, 2) else 0
        if drafts:
            do(Append((request.name,), 0, 0, drafts))
        family = [request.name]
        for _ in range(2):
            child = f"r{len(trial.requests)}"
            do(Fork(request.name, child))
            if child in trial.requests:
                family.append(child)
        do(Append(family[:: -1 if chance(chooser, 2) else 1], chooser.integer(0, 2), chooser.integer(0, drafts)))


def finish(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A request ends; now and then it has ended before."""
    request = _named(trial, chooser, live=None if chance(chooser, 6) else True)
    if request is not None:
        do(Free(request.name))


def preempt(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A running request gives its blocks back, to come again."""
    request = _named(trial, chooser, live=True)
    if request is not None:
        do(Preempt(request.name))


def abort(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A request in any state is aborted."""
    request = _named(trial, chooser, live=None)
    if request is not None:
        do(Abort(request.name))


def evict(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A findable block is evicted by id, or two."""
    keyed = sorted(trial.view.keyed or ())
    if keyed:
        do(Evict(dict.fromkeys([pick(chooser, keyed) for _ in range(chooser.integer(1, 2))])))


def reset(trial: Trial, chooser: Chooser, do: Do) -> None:
    """The prefix cache is reset, in use or after everybody has ended."""
    if chance(chooser, 2):
        for name in trial.live():
            do(Free(name))
    do(Reset())


def misuse_the_pool(trial: Trial, chooser: Chooser, do: Do) -> None:
    """A block is released once more than it is held; sometimes it is the null block, or none at all."""
    view, choice = trial.view, chooser.integer(0, 4)
    if choice == 0:
        do(ReleaseBlocks((view.num_blocks + chooser.integer(0, 2),)))
    elif choice == 1 and view.null_block is not None:
        do(ReleaseBlocks((view.null_block,)))
    else:
        block = chooser.integer(1, view.num_blocks - 1)
        do(ReleaseBlocks((block,) * (int(view.uses[block]) + 1)))


RULES = (
    Rule("admit", admit, 8),
    Rule("admit_the_same_again", admit_the_same_again, 5),
    Rule("decode", decode, 6),
    Rule("decode_for_a_while", decode_for_a_while, 3),
    Rule("run_a_long_one", run_a_long_one, 1),
    Rule("finish", finish, 5),
    Rule("go_on", go_on, 4),
    Rule("admit_later", admit_later, 3),
    Rule("look_up", look_up, 2, ("match",)),
    Rule("arrive_and_look_up", arrive_and_look_up, 2, ("match",)),
    Rule("branch_off", branch_off, 3, ("match",)),
    Rule("be_overtaken", be_overtaken, 2, ("match",)),
    Rule("ask_the_gate", ask_the_gate, 2, ("can_admit",)),
    Rule("release_out_of_window", release_out_of_window, 4, ("release_out_of_window",)),
    Rule("truncate", truncate, 2, ("truncate",)),
    Rule("fork", fork, 2, ("fork",)),
    Rule("fork_and_diverge", fork_and_diverge, 2, ("fork",)),
    Rule("fork_and_go_back", fork_and_go_back, 3, ("fork",)),
    Rule("preempt", preempt, 2, ("preempt",)),
    Rule("abort", abort, 1, ("abort",)),
    Rule("evict", evict, 2, ("evict",)),
    Rule("reset", reset, 1, ("reset",)),
    Rule("misuse_the_pool", misuse_the_pool, 1, ("release_blocks",)),
)

"""Who may read which token where: a model of memory that knows nothing of any allocator's rules.

What a slot holds is named by the whole sequence of tokens up to it, because keys and values depend on all tokens
before. The model writes where the tables said at the moment of the command, and then asks, for every request,
whether the positions that its next token attends to still hold what the request put (or adopted) there.
"""

from collections.abc import Iterator, Sequence

from kvledger.testing.scenario import Scenario
from kvledger.testing.view import AllocatorView

NOTHING = -1


class Contents:
    """Numbers sequences of tokens: two sequences have one number if and only if they are equal."""

    def __init__(self) -> None:
        self._number: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._without_last: list[int] = []

    def of(self, tokens: Sequence[int]) -> list[int]:
        """For each position, the number of the sequence up to and including it."""
        whole = tuple(tokens)
        known = self._known.get(whole)
        if known is None:
            known = self._known[whole] = self._count(whole)
        return known

    def _count(self, tokens: tuple[int, ...]) -> list[int]:
        numbers: list[int] = []
        number = NOTHING
        for token in tokens:
            step = (number, token)
            number = self._number.setdefault(step, len(self._number))
            if number == len(self._without_last):
                self._without_last.append(step[0])
            numbers.append(number)
        return numbers

    def without_last(self, number: int) -> int:
        """The number of the same sequence without its last token; `NOTHING` for a sequence of one."""
        return self._without_last[number]


class ContentModel:
    """The memory of one pool, written and read through block tables.

    Attributes:
        contents: what numbers the content of slots.
    """

    def __init__(self, scenario: Scenario, contents: Contents | None = None) -> None:
        """`contents` are `Contents` unless others are given."""
        self._groups = scenario.groups
        self.contents = Contents() if contents is None else contents
        # For each block: the group whose layers wrote it, and what each slot holds.
        self._memory: dict[int, tuple[int, list[int]]] = {}

    # -- what commands do --------------------------------------------------------------------------------------------

    def write(
        self, name: str, tokens: Sequence[int], start: int, view: AllocatorView, computed_from: int | None = None
    ) -> str | None:
        """Place `tokens[start:]` through the request's tables. Says which token has no slot, or None.

        Tokens before `computed_from` come from elsewhere; those that no computed token attends to need no slot. Nor do
        the tokens before the last one in a group of states.
        """
        numbers = self.contents.of(tokens)
        for group, shape in enumerate(self._groups):
            table, size = view.tables[name][group], shape.block_size
            needed_from = start if computed_from is None else shape.attends_from(computed_from)
            needed = set(range(needed_from, len(tokens)))
            if shape.kind == "state":
                needed = {len(tokens) - 1, *((needed_from,) if computed_from is not None and computed_from else ())}
            if len(table) * size < len(tokens):
                return (
                    f"request {name!r} has {len(tokens)} tokens placed, but group {group} holds {len(table)} blocks of "
                    f"{size}: no slot for position {len(table) * size}"
                )
            for position in range(start, len(tokens)):
                block = table[position // size]
                if block == view.null_block:
                    if position not in needed:
                        continue
                    return f"position {position} of request {name!r} is written to the null block of group {group}"
                self._slots_to_write(block, group)[position % size] = numbers[position]
        return None

    def expect(self, name: str, start: int, stop: int, view: AllocatorView) -> None:
        """The slots of positions `start <= position < stop` hold nothing yet: their content is still to come."""
        for group, shape in enumerate(self._groups):
            table, size = view.tables[name][group], shape.block_size
            for position in range(start, min(stop, len(table) * size)):
                if table[position // size] != view.null_block:
                    self._slots_to_write(table[position // size], group)[position % size] = NOTHING

    def copy_on_write(self, before: AllocatorView, after: AllocatorView) -> None:
        """Where a table entry changed to another block, a backend copies the old block's content."""
        pairs = {
            pair
            for name, groups in after.tables.items()
            for old_table, new_table in zip(before.tables.get(name, ()), groups, strict=False)
            for pair in zip(old_table, new_table, strict=False)
        }
        self._copy({(old, new) for old, new in pairs if old != new and new != after.null_block})

    def copy_at_fork(self, parent: str, child: str, view: AllocatorView) -> None:
        """A manager that gives a child blocks of its own copies the parent's content into them."""
        tables = zip(view.tables[parent], view.tables[child], strict=True)
        pairs = {pair for old, new in tables for pair in zip(old, new, strict=False)}
        self._copy({(old, new) for old, new in pairs if old != new and new != view.null_block})

    def _copy(self, pairs: set[tuple[int, int]]) -> None:
        old_memory = dict(self._memory)
        for old, new in pairs:
            if old in old_memory:
                owner, slots = old_memory[old]
                self._memory[new] = (owner, list(slots))

    def _slots_to_write(self, block: int, group: int) -> list[int]:
        owner, slots = self._memory.get(block, (NOTHING, []))
        if owner != group:
            slots = [NOTHING] * self._groups[group].block_size
            self._memory[block] = (group, slots)
        return slots

    # -- what must hold ----------------------------------------------------------------------------------------------

    def misread(self, name: str, tokens: Sequence[int], first: int, view: AllocatorView) -> str | None:
        """What the token at position `first` would read wrongly, or None.

        In each group it reads the positions that it attends to, as far as `tokens` are placed; of a group of states,
        those of earlier steps.
        """
        numbers = self.contents.of(tokens)
        for group, shape in enumerate(self._groups):
            table, size = view.tables[name][group], shape.block_size
            # What the tokens of one step hand on to each other as a state is in no block.
            start, stop = shape.attends_from(first), first if shape.kind == "state" else len(tokens)
            for index in range(start // size, -(-stop // size)):
                block = table[index] if index < len(table) else view.null_block
                low, high = max(start, index * size), min(stop, (index + 1) * size)
                reading = f"the token at {first} of request {name!r} attends to {low} in group {group} ({shape.kind})"
                if block is None or block == view.null_block:
                    return f"{reading}, but the block that held it was given back"
                if self._slots(block, group)[low - index * size : high - index * size] != numbers[low:high]:
                    return f"{reading} and reads block {block}, which holds the content of another sequence"
        return None

    def block_holds(self, block: int, group: int, tokens: Sequence[int]) -> bool:
        """Whether a block holds the content of the last of these tokens: a block of them, or what is left of one."""
        size = self._groups[group].block_size
        count = len(tokens) % size or size
        return self._slots(block, group)[:count] == self.contents.of(tokens)[-count:]

    def find(self, tokens: Sequence[int], group: int, view: AllocatorView) -> bool:
        """Whether some findable block of the group holds the block that these tokens end."""
        wanted = self.contents.of(tokens)[-self._groups[group].block_size :]
        keyed = view.keyed or {}
        return any(owner == group and self._slots(block, group) == wanted for block, (owner, _) in keyed.items())

    def unreachable(self, view: AllocatorView) -> Iterator[tuple[int, int]]:
        """(block, group) of findable blocks whose predecessor cannot be found, where a hit needs the whole prefix."""
        for group, shape in enumerate(self._groups):
            if not shape.attends_to_all or view.keyed is None:
                continue
            keyed = [self._slots(block, group) for block, (owner, _) in view.keyed.items() if owner == group]
            ends = {slots[-1] for slots in keyed}
            for block, (owner, _) in view.keyed.items():
                slots = self._slots(block, group)
                if owner == group and slots[0] != NOTHING:
                    before = self.contents.without_last(slots[0])
                    if before != NOTHING and before not in ends:
                        yield block, group

    def _slots(self, block: int, group: int) -> list[int]:
        owner, slots = self._memory.get(block, (NOTHING, []))
        return slots if owner == group else [NOTHING] * self._groups[group].block_size

"""An allocator of one's own under the property-test kit, which finds its bug and prints the shortest history.

Run it with `python examples/allocator_under_test.py`; docs/test_your_allocator.md explains every part.
"""

from kvledger.testing import (
    AllocatorView,
    KitFailure,
    Limits,
    Placement,
    RefusedError,
    Scenario,
    Supports,
    explore,
    supporting,
)

BLOCK_SIZE = 4


class Forgetful:
    """Hands out blocks of 4 tokens, and forgets the last block of whatever it frees."""

    def __init__(self, num_blocks: int) -> None:
        self.free_blocks = list(range(1, num_blocks))
        self.tables: dict[str, list[int]] = {}
        self.num_blocks = num_blocks

    def allocate(self, placement: Placement, found: object, limits: Limits) -> bool:
        table = self.tables.get(placement.request_id, [])
        missing = -(-(placement.start + placement.num_new_tokens) // BLOCK_SIZE) - len(table)
        if missing > len(self.free_blocks):
            return False
        self.tables[placement.request_id] = table + [self.free_blocks.pop(0) for _ in range(missing)]
        return True

    def free(self, request_id: str) -> None:
        if request_id not in self.tables:
            raise RefusedError(f"{request_id} holds nothing")
        self.free_blocks += self.tables.pop(request_id)[:-1]

    def view(self) -> AllocatorView:
        tables = {name: [table] for name, table in self.tables.items()}
        return AllocatorView(self.num_blocks, tables, self.free_blocks)


@supporting(Supports(block_sizes=(BLOCK_SIZE,)))
def make(scenario: Scenario) -> Forgetful:
    """A manager for one history."""
    return Forgetful(scenario.num_blocks)


if __name__ == "__main__":
    try:
        explore(make, seed=1)
    except KitFailure as failure:
        print(failure)

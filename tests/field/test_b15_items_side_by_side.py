"""B15: two images side by side, whose boundary moves between equal placeholder tokens."""

from kvledger.core.keys.extra_keys import ExtraKeys, MultimodalItem

PLACEHOLDERS = [32_000] * 16


def items(first: int) -> ExtraKeys:
    """Item A on the first placeholders, item B on the others."""
    return ExtraKeys(multimodal=[MultimodalItem("A", 0, first), MultimodalItem("B", first, 16 - first)])


def test_b15_the_boundary_between_items_counts(ledger_of) -> None:
    ledger = ledger_of(40, block_size=8)
    assert ledger.serve("3 and 13", [*PLACEHOLDERS, 1], items(3)) == 0
    assert ledger.serve("5 and 11", [*PLACEHOLDERS, 1], items(5)) == 0
    assert ledger.serve("3 and 13 again", [*PLACEHOLDERS, 1], items(3)) == 16

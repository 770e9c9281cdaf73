"""How the source is organised: `python -m bench.house` prints the same counts."""

import re

import pytest

from bench import house


@pytest.mark.parametrize("folder", ["core", "backends", "sim"])
def test_rooms_do_not_import_each_other_in_a_circle(folder: str) -> None:
    assert house.circle(house.arrows(folder)) == []


def test_a_circle_of_rooms_is_found() -> None:
    assert house.circle({("a", "b"): set(), ("b", "c"): set(), ("c", "b"): set()}) == ["b", "c", "b"]


def test_core_has_few_arrows_between_rooms_of_a_dozen_files() -> None:
    files = house.files_of_rooms("core")
    assert files.total() <= 75
    assert max(count for room, count in files.items() if room != ".") <= 14
    assert len(house.arrows("core")) <= 30


def test_every_module_of_sim_but_three_lies_in_a_room() -> None:
    assert house.files_of_rooms("sim")["."] <= 3


def test_a_question_is_typed_everywhere_in_sim() -> None:
    assert house.occurrences('given["', "sim") == 0


def test_only_commands_and_reports_print() -> None:
    assert house.printing_modules("commands", "report") == []
    assert house.printing_modules("report")


def test_no_class_exists_only_to_be_derived_from_once() -> None:
    assert house.single_subclass_bases() == []


@pytest.mark.parametrize("page", ["docs/design.md", "CONTRIBUTING.md"])
def test_rooms_of_sim_import_only_what_the_maps_list_before_them(page: str) -> None:
    text = (house.ROOT / page).read_text(encoding="utf-8")
    listed = re.findall(r"`(\w+)`", text.partition("| `sim/`")[2].partition("| `tests/`")[0])
    order = {room: listed.index(room) for room in house.files_of_rooms("sim") if room != "."}
    assert [arrow for arrow in house.arrows("sim") if order[arrow[0]] <= order[arrow[1]]] == []

"""torch's allocator settings as a string: entries are kept, one is replaced, and what stood before comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.backends.profiling.allocator_settings import scoped_max_split_size, split_settings, with_max_split_size
from kvledger.core.errors import InputError


class Settings:
    def __init__(self, text: str) -> None:
        self.history = [text]

    def allocator_settings(self) -> str:
        return self.history[-1]

    def set_allocator_settings(self, settings: str) -> None:
        self.history.append(settings)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "max_split_size_mb:20"),
        ("max_split_size_mb:512", "max_split_size_mb:20"),
        ("expandable_segments:True", "expandable_segments:True,max_split_size_mb:20"),
        (
            "roundup_power2_divisions:[256:1,512:2,>:4],max_split_size_mb:512, backend:native, ",
            "roundup_power2_divisions:[256:1,512:2,>:4],backend:native,max_split_size_mb:20",
        ),
    ],
)
def test_one_entry_is_replaced_and_the_others_stay(before: str, after: str) -> None:
    assert with_max_split_size(before, 20) == after


@given(st.lists(st.sampled_from(["a:1", "b:[256:1,>:4]", "c:0.8", "max_split_size_mb:64"]), max_size=6))
def test_entries_come_back_as_they_were_joined(entries: list[str]) -> None:
    assert split_settings(",".join(entries)) == entries


@pytest.mark.parametrize("text", ["a:[1,b:2", "a:1],b:2", "a:[[1]]"])
def test_brackets_that_do_not_match_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="bracket"):
        split_settings(text)


def test_a_size_that_torch_refuses_is_refused_before_anything_is_set() -> None:
    settings = Settings("a:1")
    with pytest.raises(InputError, match="smallest value that torch takes is 20"), scoped_max_split_size(settings, 19):
        pass
    assert settings.history == ["a:1"]


def test_the_exact_string_comes_back_after_the_scope_and_after_an_exception() -> None:
    settings = Settings("a:1, max_split_size_mb:64")
    with scoped_max_split_size(settings):
        assert settings.history[-1] == "a:1,max_split_size_mb:20"
    with pytest.raises(KeyError), scoped_max_split_size(settings):
        raise KeyError
    assert settings.history[-1] == "a:1, max_split_size_mb:64"


@pytest.mark.torch
def test_torch_itself_takes_and_gives_back_these_strings() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip(f"torch {torch.__version__} does not say which allocator settings are in force")

    class Torch:
        def allocator_settings(self) -> str:
            return torch._C._accelerator_getAllocatorSettings()

        def set_allocator_settings(self, settings: str) -> None:
            torch._C._accelerator_setAllocatorSettings(settings)

    before = Torch().allocator_settings()
    with scoped_max_split_size(Torch()):
        assert "max_split_size_mb:20" in Torch().allocator_settings()
    assert Torch().allocator_settings() == before

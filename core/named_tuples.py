"""Named tuples at the price of tuples: for those that every request or step makes."""

from typing import Any, Protocol, TypeVar, cast

_T = TypeVar("_T")


class _MakesNamedTuple(Protocol):
    def __call__(self, cls: type[_T], values: tuple[Any, ...], /) -> _T: ...


# An instance of `cls` out of all its values, in order and without defaults. Half of what calling the class takes, whose
# constructor is a function in Python.
named_tuple: _MakesNamedTuple = cast("Any", tuple).__new__

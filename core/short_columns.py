"""Columns of one entry, made once: most commands are about one request, and a log keeps what it is given."""


class ShortColumns(dict[int, tuple[int]]):
    """Number -> the column that holds it alone; of rows, groups and counts of blocks, so there are not many.

    A tuple made for each event would be looked at by the garbage collector before it is left alone.
    """

    def __missing__(self, number: int) -> tuple[int]:
        column = self[number] = (number,)
        return column

"""Where the job is in its data, so that a rollback can move it.  Used by the guard."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Indexed(Protocol):
    """Something with batches by index."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the batch at an index."""
        ...


Loader = Callable[[int], Any] | Indexed | Iterable[Any]
"""A function from batch index to batch, a sequence of batches, or any iterable (not movable)."""


class DataPosition:
    """Hands out batches in order; `index` is the absolute id of the next one."""

    def __init__(self, loader: Loader | None) -> None:
        self.index = 0
        self.movable = True
        self._take: Callable[[int], Any] = lambda index: index
        if callable(loader):
            self._take = loader
        elif isinstance(loader, Indexed):
            self._take = loader.__getitem__
        elif loader is not None:
            self.movable = False
            iterator: Iterator[Any] = iter(loader)
            self._take = lambda _: next(iterator)

    def take(self) -> Any:
        """Return the next batch; without a loader, its index.

        Raises:
            StopIteration, IndexError: When the data are at their end.
        """
        batch = self._take(self.index)
        self.index += 1
        return batch

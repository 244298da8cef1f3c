"""Where the job is in its data, so that a rollback can move it.  Used by the guard."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Indexed(Protocol):
    """Something with batches by index."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the batch at an index."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A loader that can say where it is and go back there, as torchdata's StatefulDataLoader."""

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator that goes on from where the loader is."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go back there, from the next `iter` on."""
        ...


Loader = Callable[[int], Any] | Indexed | Stateful | Iterable[Any]
"""A function from batch index to batch, a sequence of batches, a loader with state, or any iterable
(not movable)."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the data were before a batch was taken."""

    index: int
    """Absolute id of the next batch."""
    loader: dict[str, Any] | None = None
    """State of a loader that has one."""
    generator: Any = None
    """State of that loader's own random generator: its state_dict leaves out the epochs to come."""


class DataPosition:
    """Hands out batches in order; `index` is the absolute id of the next one."""

    def __init__(self, loader: Loader | None) -> None:
        self.index = 0
        self.movable = True
        self._take: Callable[[int], Any] = lambda index: index
        self._stateful: Stateful | None = None
        if isinstance(loader, Stateful):
            self._stateful = loader
            self._iterator = iter(loader)
            self._take = lambda _: self._next()
        elif callable(loader):
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
            StopIteration, IndexError: When the data are at their end.  A loader with state begins
                again instead.
        """
        batch = self._take(self.index)
        self.index += 1
        return batch

    def now(self) -> Position:
        """Return where the data are."""
        if self._stateful is None:
            return Position(self.index)
        generator = self._generator()
        state = None if generator is None else generator.get_state()
        return Position(self.index, self._stateful.state_dict(), state)

    def move(self, position: Position, skip: int) -> None:
        """Go back, and leave out the next `skip` batches.

        May draw from torch's random generator, as loaders do where they begin.
        """
        self.index = position.index
        if self._stateful is None or position.loader is None:
            self.index += skip
            return
        self._stateful.load_state_dict(position.loader)
        self._iterator = iter(self._stateful)
        generator = self._generator()
        if generator is not None and position.generator is not None:
            generator.set_state(position.generator)
        for _ in range(skip):
            self.take()

    def _generator(self) -> Any:
        return getattr(self._stateful, "generator", None)

    def _next(self) -> Any:
        assert self._stateful is not None  # noqa: S101  only then is it called
        try:
            return next(self._iterator)
        except StopIteration:  # the next epoch
            self._iterator = iter(self._stateful)
            return next(self._iterator)

"""Where the threads of a world meet, on the CPU."""

from __future__ import annotations

import threading
from typing import Any


class Abandoned(RuntimeError):
    """A rank waits for one that has raised an error or returned."""


class Meetings:
    """Where the threads of all ranks meet, time after time, to show each other something."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._here: dict[int, tuple[str, Any]] = {}
        self._gone: dict[int, BaseException | None] = {}

    def meet(self, rank: int, what: str, shown: Any) -> list[Any]:
        """What all ranks show, by rank, once the last one is here.

        Raises:
            Abandoned: a rank has left and will not come.
            ValueError: the ranks are here for different things.
            RuntimeError: this rank is here already, in another thread.
        """
        with self._changed:
            here = self._here
            if rank in here and not self._gone:
                raise RuntimeError(f"rank {rank} is in {here[rank][0]}, in another thread")
            here[rank] = what, shown
            if len(here) == self.world_size:
                self._here = {}
                self._changed.notify_all()
            self._changed.wait_for(lambda: len(here) == self.world_size or self._gone)
            if len(here) < self.world_size:
                raise Abandoned(f"rank {rank} waits in {what}, but {self._who_left()}")
        calls = [here[each][0] for each in range(self.world_size)]
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {each}: {call}" for each, call in enumerate(calls))
            raise ValueError(f"the ranks make different calls: {listed}")
        return [here[each][1] for each in range(self.world_size)]

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Rank will not come any more: it has returned, or raised `error`."""
        with self._changed:
            self._gone[rank] = error
            self._changed.notify_all()

    def first_error(self) -> BaseException | None:
        """What the first rank raised, not as it was abandoned; None if all have returned."""
        errors = [error for error in self._gone.values() if error is not None]
        real = [error for error in errors if not isinstance(error, Abandoned)]
        return next(iter(real + errors), None)

    def _who_left(self) -> str:
        rank, error = next(iter(self._gone.items()))
        how = "returned" if error is None else f"raised {type(error).__name__}: {error}"
        return f"rank {rank} has {how}"

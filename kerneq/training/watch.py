"""Who follows a run: the terminal, TensorBoard, or nobody."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

from kerneq.training.meter import Scores


@dataclasses.dataclass(frozen=True)
class Moment:
    """Where a run is, and how the present epoch has gone so far."""

    epoch: int  # from 1
    epochs: int
    step: int  # of the whole run
    steps: int
    rate: float  # learning rate
    images_per_second: float
    scores: Scores


class AbstractWatcher(abc.ABC):
    """Told about a run while it happens; must not change it."""

    @abc.abstractmethod
    def tick(self, moment: Moment) -> None:
        """Called a few times a second."""

    @abc.abstractmethod
    def epoch(self, row: Mapping[str, Any]) -> None:
        """Called with each line of metrics.jsonl."""

    @abc.abstractmethod
    def close(self) -> None:
        """Called once, however the run ended."""


@final
class Watchers(AbstractWatcher):
    """Any number of watchers as one; none at all is a quiet run."""

    def __init__(self, watchers: Sequence[AbstractWatcher] = ()):
        self.watchers = tuple(watchers)

    def tick(self, moment: Moment) -> None:
        for watcher in self.watchers:
            watcher.tick(moment)

    def epoch(self, row: Mapping[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.epoch(row)

    def close(self) -> None:
        for watcher in self.watchers:
            watcher.close()

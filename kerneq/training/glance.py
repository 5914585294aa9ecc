"""A look at a running epoch, now and then: reading the sums makes the device wait, so not at every step."""

import math
import time
from typing import final

from kerneq.training.errors import TrainingError
from kerneq.training.meter import Scores
from kerneq.training.state import REMEDY, State
from kerneq.training.watch import AbstractWatcher, Moment

INTERVAL = 0.5  # seconds


@final
class Glance:
    """Reads the meter twice a second, tells the watcher, and ends the run if the loss is not a number."""

    def __init__(self, watcher: AbstractWatcher, steps: int):
        self.watcher = watcher
        self.steps = steps
        self.time = time.monotonic()
        self.step = 0

    def look(self, state: State) -> None:
        now = time.monotonic()
        if now - self.time < INTERVAL:
            return
        scores = state.meter.read()
        check_loss(scores, state)
        taken = state.step - self.step if self.step else 0
        moment = Moment(
            epoch=state.epoch + 1,
            epochs=state.config.training.epochs,
            step=state.step,
            steps=self.steps,
            rate=state.rate,
            images_per_second=taken * state.config.training.batch_size / (now - self.time),
            scores=scores,
        )
        self.time, self.step = now, state.step
        self.watcher.tick(moment)


def check_loss(scores: Scores, state: State) -> None:
    if not math.isfinite(scores.loss):
        raise TrainingError(f"The loss became {scores.loss} by step {state.step} (epoch {state.epoch + 1}). {REMEDY}")

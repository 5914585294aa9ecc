"""What happens around the steps of a run: its time is measured, loggers hear of it, it is saved, Ctrl-C stops it."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, ClassVar, final

from ...loading import TrainingError
from ...solution import NonfiniteInputError
from ..run import Run, Stopped
from ..run.checkpoint import Writer
from .logger import AbstractLogger, Progress
from .process import EAGER_STEPS
from .state import State, Write

SHORT, LONG = 60.0, 600.0  # seconds that need no announcement, and those from which on it also names what takes less
INTERVAL = 0.5  # seconds between two reports of progress, each of which makes the host wait for the device


@final
class Clock:
    """Where the time of a run goes: every second since `began` (of `time.monotonic`) belongs to one phase."""

    START: ClassVar = ("imports", "device", "data", "model", "first steps")

    def __init__(self, began: float):
        self.last = began
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Count what has passed since the last call as time of this phase."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now

    def __str__(self) -> str:
        start = {phase: spent for phase, spent in self.seconds.items() if phase in self.START}
        others = {phase: spent for phase, spent in self.seconds.items() if phase not in self.START}
        texts = [", ".join(f"{phase} {spent:.1f}" for phase, spent in some.items()) for some in (start, others)]
        return f"{sum(self.seconds.values()):.1f} s: start {sum(start.values()):.1f} ({texts[0]}), {texts[1]}"


def announce(loggers: Sequence[AbstractLogger], text: str) -> None:
    """Send a sentence to every logger."""
    for logger in loggers:
        logger.log_message(text)


@final
class Supervisor:
    """Does what is due between the steps of a run, which are taken in the context of `follow`."""

    def __init__(self, state: State, run: Run, loggers: Sequence[AbstractLogger], clock: Clock, steps_per_epoch: int):
        self.state, self.run, self.loggers, self.clock = state, run, loggers, clock
        self.steps_per_epoch = steps_per_epoch
        self.steps = state.config.training.epochs * steps_per_epoch
        self.first = state.step  # where this start of the run begins
        self.writer = Writer()
        self.stop_asked: Callable[[], bool] = lambda: False
        self.reported = self.started = self.epoch_began = time.monotonic()

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Catch Ctrl-C and write files meanwhile; at the end, write down and announce where the time went."""
        stop = catch_stop(self.state.process.world == 1, partial(announce, self.loggers))
        with self.writer, stop as self.stop_asked, explain_errors(self.state):
            yield
        self.clock.lap("writing")
        if self.state.process.leads:
            self.run.finish(self.clock.seconds)
        announce(self.loggers, str(self.clock))
        if self.stop_asked():  # after the last step: the caller may have more to do than this run
            raise Stopped(f"Stopped after step {self.state.step}, the last one; {self.run.path} is complete.")

    def begin_epoch(self) -> None:
        """Start to count the seconds of an epoch, or continue with one."""
        self.started = time.monotonic()
        self.epoch_began = self.started - self.state.seconds

    def after_step(self) -> None:
        """Measure, report, save and stop, each if it is time to."""
        state, settings, now = self.state, self.state.config.training, time.monotonic()
        state.seconds = now - self.epoch_began
        taken = state.step - self.first
        if taken == 1 and state.process.device.type == "cpu":
            self._announce_duration(now - self.started)
        if taken == (EAGER_STEPS + 1 if state.captured else 1):
            state.process.synchronise()
            self.clock.lap("first steps")
        if now - self.reported >= INTERVAL:
            self._report()
            self.reported = time.monotonic()
        stop = (
            self.stop_asked()
        )  # ask once: a stop that came between two calls would end the run without saving this step
        every = settings.checkpoint_steps
        if stop or (every > 0 and state.step % every == 0 and state.batch < self.steps_per_epoch):
            self.writer.submit(state.checkpoint(self.run))
        if stop:
            raise Stopped(f"Stopped after step {state.step}; {self.run.path} continues with --resume.")

    def end_training(self) -> None:
        """Wait for the device, and count the seconds of the epoch's steps."""
        self.state.process.synchronise()
        self.state.seconds = time.monotonic() - self.epoch_began
        self.clock.lap("training")

    def after_epoch(self, row: Mapping[str, Any], writes: Sequence[Write]) -> None:
        """Write the files of a finished epoch, and tell the loggers its row of metrics."""
        self.writer.submit(writes)
        for logger in self.loggers:
            logger.log_epoch(row)
        self.clock.lap("validation")

    def _report(self) -> None:
        """Tell the loggers how the epoch goes."""
        state, settings = self.state, self.state.config.training
        scores = state.read_scores(state.accumulator.sums)
        speed = state.batch * settings.batch_size / state.seconds
        progress = Progress(state.epoch + 1, settings.epochs, state.step, self.steps, state.rate, speed, scores)
        for logger in self.loggers:
            logger.log_progress(progress)

    def _announce_duration(self, seconds: float) -> None:
        """Announce what the rest of the run will take on this CPU at so many seconds a step, unless that is soon."""
        left = (self.steps - self.state.step) * seconds
        if left < SHORT:
            return
        speed = self.state.config.training.batch_size / seconds
        hint = "; `kerneq train geq-tiny-cifar10` is small, and a GPU is faster" if left > LONG else ""
        announce(self.loggers, f"about {format_duration(left)} on this CPU, at {speed:,.0f} images/s{hint}")


def format_duration(seconds: float) -> str:
    """3 h 20 min, 12 min, 45 s: as precise as a guess can be."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


@contextmanager
def explain_errors(state: State) -> Iterator[None]:
    """Say in a sentence what a step may raise that is no bug.

    A layer on a CPU refuses features that are no numbers, when the run has diverged; PyTorch refuses a batch norm of
    one value in each channel, in the middle of the first step.
    """
    try:
        yield
    except NonfiniteInputError:
        state.refuse("The features became infinite or NaN")
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise TrainingError(
            "A batch norm of this model got a single value of each channel, which has no variance: raise "
            "training.batch_size, of which every process has its share."
        ) from None


@contextmanager
def catch_stop(active: bool, announce: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Catch Ctrl-C and SIGTERM; yields a function that says whether one came, to call between two steps.

    So a step is never cut in half. That a stop was asked for is announced at once: a step may take a while. A second
    Ctrl-C stops at once. Not active under torchrun, whose agent ends its workers itself, nor outside the main thread.
    """
    asked = threading.Event()
    if not active or threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        # Who reads our output through a pipe, as `| tee`, may have died of the same Ctrl-C: rich then wants to exit.
        # Or rich is just importing a part of itself, which it cannot do twice at once.
        with suppress(Exception, SystemExit):
            announce("stopping after this step …")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

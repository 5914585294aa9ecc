"""The training loop: batches → loss → gradient → update of the weights; and what is due between its steps."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from ...models import AbstractModel
from ..console import describe_seconds
from ..data import Batches
from ..run import CheckpointError, Run, Stopped
from ..run.checkpoint import Writer
from ..run.config import Config
from .build import Builder, build_model, class_counts, make_training_batches, place
from .logger import AbstractLogger, Clock, Progress, announce
from .metrics import validate
from .optimizer import rate_multiple, set_rate, update_average
from .process import EAGER_STEPS, GraphedStep, Process, catch_stop, join_processes, prefetch, wake
from .start import begin_from_weights
from .state import State, Write, explain_errors

SHORT, LONG = 60.0, 600.0  # seconds that need no announcement, and those from which on it also names what takes less
INTERVAL = 0.5  # seconds between two reports of progress, each of which makes the host wait for the device


def train(
    config: Config,
    path: Path | str,
    *,
    resume: bool = False,
    build: Builder = build_model,
    loggers: Sequence[AbstractLogger] = (),
    began: float | None = None,
) -> list[dict[str, Any]]:
    """Train the configured model in the run folder `path`; return the rows of its metrics.jsonl.

    With `resume` a run that `path` already holds goes on from its last checkpoint, bit for bit as if it had not been
    interrupted; without it, such a folder is refused. Ctrl-C saves the step in hand and raises `Stopped`, also where
    that was the last one. Where the time went, since `began` if that is given (as `time.monotonic` has it), is
    announced to the loggers and written to environment.json.
    """
    run = Run(Path(path))
    clock = Clock(time.monotonic() if began is None else began)
    clock.lap("imports")
    try:
        with join_processes(config.device) as process:
            # A worker that torchrun restarts resumes, and may have to wait until the killed one is gone.
            resume, patience = resume or process.restarts > 0, 30.0 if process.restarts else 0.0
            with run.locked(patience) if process.leads else nullcontext():
                return _train(config, run, process, resume, build, loggers if process.leads else (), clock)
    finally:
        for logger in loggers:
            logger.close()


def _train(
    config: Config,
    run: Run,
    process: Process,
    resume: bool,
    build: Builder,
    loggers: Sequence[AbstractLogger],
    clock: Clock,
) -> list[dict[str, Any]]:
    """Train as one of the processes: read the data, build the model, open the run, and take its steps."""
    settings = config.training
    choose_algorithms(settings.deterministic)
    torch.manual_seed(config.seed)
    clock.lap("device")
    with wake(process.device, settings.amp):
        batches, held_out = make_training_batches(config, process, partial(announce, loggers))
        clock.lap("data")
        model = place(build(config, batches.images), config, process)
    if config.start.run and run.newest() is None:
        begin_from_weights(model, batches.images, config, process, partial(announce, loggers))
    set_up_model(model, config, process)
    state = State(model, config, process)
    open_run(run, state, batches, held_out, resume, partial(announce, loggers))
    if settings.graph and process.device.type == "cuda" and not state.captured:
        announce(loggers, "without a CUDA graph: there are several processes, or model.check_every < model.max_steps")
    network, autocast = process.wrap(model), process.autocast(settings.amp)
    clock.lap("model")

    def update(x: Tensor, target: Tensor) -> None:
        """Update the weights by one batch, and measure it; nothing here waits for the device."""
        with autocast:
            logits, solutions = network(x, solutions=True)
        lowered = subtract_margin(logits.float(), target, settings.margin)
        loss = cross_entropy(lowered, target, label_smoothing=settings.label_smoothing)
        state.optimizer.zero_grad()
        torch.autograd.backward(loss)
        if settings.clip > 0:
            clip_grad_norm_(model.parameters(), settings.clip)
        state.optimizer.step()
        state.accumulator.add(loss.detach(), logits, target, solutions)

    update_once = GraphedStep(update) if state.captured else update
    supervisor = Supervisor(state, run, loggers, clock, len(batches))
    with supervisor.follow():
        while state.epoch < settings.epochs and not state.exhausted:
            network.train(not config.start.frozen)  # its batch norms, γ and norms of W stay, too
            supervisor.begin_epoch()
            for x, target in prefetch(batches.epoch(state.epoch, start=state.batch), process.device):
                multiple = rate_multiple(config.schedule, state.step, supervisor.steps, supervisor.steps_per_epoch)
                state.rate = multiple * config.optimizer.lr
                set_rate(state.optimizer, multiple)
                update_once(x, target)
                if state.average is not None:
                    update_average(state.average, model, settings.ema, state.step)
                state.step += 1
                state.batch += 1
                supervisor.after_step()
            supervisor.finish_epoch(held_out)
    return run.rows()


def set_up_model(model: AbstractModel, config: Config, process: Process) -> None:
    """Freeze and compile what the configuration says; each process has random numbers of its own."""
    if config.start.frozen:
        model.requires_grad_(False).get_submodule("head").requires_grad_(True)
    if process.rank > 0:
        torch.manual_seed(config.seed + process.rank)
    if config.training.compile:
        model.compile_map()


@final
class Supervisor:
    """What is due between the steps of a run, which are taken in the context of `follow`: measure, report, validate,
    save, and stop when asked to."""

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
        state, now = self.state, time.monotonic()
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
        # Ask once: a stop that came between two calls would end the run without saving this step.
        stop = self.stop_asked()
        if stop or (self._checkpoint_due() and state.batch < self.steps_per_epoch):
            self.writer.submit(state.checkpoint(self.run))
        if stop and state.batch < self.steps_per_epoch:  # else its epoch is closed first, while its numbers are there
            self._stop()

    def finish_epoch(self, held_out: Batches | None) -> None:
        """Close the epoch: validate, write its files and tell the loggers. All processes must call it together.

        The order matters if a kill falls in between: the row and the best weights first, the checkpoint that moves past
        them last, so that whatever is missing is made again.
        """
        state, settings = self.state, self.state.config.training
        state.process.synchronise()
        state.seconds = time.monotonic() - self.epoch_began
        self.clock.lap("training")
        scores = state.read_scores(state.process.total(state.accumulator.sums))
        epoch = state.epoch + 1
        last = epoch == settings.epochs
        validation, diagnostics = None, {}
        writes: list[Write] = []
        if last or epoch % settings.validate_epochs == 0:
            better = last  # where nothing is held out, the last weights are the best
            if held_out is not None:
                state.process.share_buffers(state.candidate)
                validation = validate(state.evaluated, held_out, state.process, settings.amp)
                accuracy = validation["accuracy"] or 0.0
                better = state.best is None or accuracy > state.best
                state.best = accuracy if better else state.best
                state.stale = 0 if better else state.stale + 1
                last = last or state.exhausted
            if better:
                writes += state.best_weights(self.run)
            # The energy is NaN where no solve of this process was one of training.
            diagnostics = {name: value for name, value in state.model.diagnostics().items() if not math.isnan(value)}
        row = {
            "epoch": epoch,
            "step": state.step,
            "rate": state.rate,
            "seconds": round(state.seconds, 3),
            "train": scores,
            "validation": validation,
            "diagnostics": diagnostics,
        }
        if state.process.leads:
            writes.append(partial(self.run.add_row, row))
        state.epoch, state.batch, state.seconds = epoch, 0, 0.0
        state.accumulator.reset()
        stop = self.stop_asked() and not last
        if last or stop or epoch % settings.checkpoint_epochs == 0 or self._checkpoint_due():
            writes += state.checkpoint(self.run)
        self.writer.submit(writes)
        for logger in self.loggers:
            logger.log_epoch(row)
        self.clock.lap("validation")
        if state.exhausted:
            announce(self.loggers, f"no better in {state.stale} validations: training.patience ends it here")
        if stop:
            self._stop()

    def _stop(self) -> NoReturn:
        """End this start of the run; everything is saved."""
        raise Stopped(f"Stopped after step {self.state.step}; {self.run.path} continues with --resume.")

    def _checkpoint_due(self) -> bool:
        """Whether `checkpoint_steps` wants a checkpoint after the present step."""
        every = self.state.config.training.checkpoint_steps
        return every > 0 and self.state.step % every == 0

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
        speed, config = self.state.config.training.batch_size / seconds, self.state.config
        hint = "; `kerneq train geq-tiny-cifar10` is small, and a GPU is faster"
        words = f"{describe_seconds(left)} on this CPU, at {speed:,.3g} images/s"
        announce(self.loggers, words + (hint if left > LONG and not config.start.run else ""))


def open_run(
    run: Run,
    state: State,
    batches: Batches,
    held_out: Batches | None,
    resume: bool,
    announce: Callable[[str], None],
) -> None:
    """Bring `state` to where the run stands (its start, or its newest checkpoint), and write down this start of it."""
    classes = batches.images.classes
    counts = class_counts(*(part.images for part in (batches, held_out) if part is not None))
    begun, newest = run.find_start(state.config, classes, counts, resume)
    if newest is not None:
        try:
            state.restore(newest)
            if state.step != state.epoch * len(batches) + state.batch or state.batch > len(batches):
                raise CheckpointError(f"{newest} is at step {state.step}, which is not in epoch {state.epoch + 1}.")
        except CheckpointError as error:
            raise CheckpointError(f"{error} {run.advice(newest)}") from None
    elif begun:
        announce(f"{run.path} has no checkpoint to go on from: it begins anew")
    if state.process.leads:
        where = state.process.device, state.process.world
        run.begin(state.config, batches.images, counts, *where, state.epoch, state.step)


def choose_algorithms(deterministic: bool) -> None:
    """Fastest algorithms, or those that give the same bits every time."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call itself imports the compiler: seconds
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def subtract_margin(logits: Tensor, target: Tensor, margin: float) -> Tensor:
    """The logits, that of the true class less by `margin`; with soft targets, each class by its share of it."""
    if margin == 0:
        return logits
    if target.dim() == 1:
        target = target[:, None] == torch.arange(logits.shape[1], device=target.device)
    return logits - margin * target

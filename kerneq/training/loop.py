"""The training loop: batches → loss → gradient → step, logged, saved, and resumable at any step."""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from ..data import Batches
from ..run import CheckpointError, Run, Stopped, TrainingError, checkpoint
from ..run.config import Config
from ..run.environment import environment
from .build import Builder, Trainable, build_model, place, training_batches
from .graph import GraphedStep, Step
from .logger import AbstractLogger, Progress
from .metrics import validate
from .process import Process, finish, start, stopping
from .state import State, rate_multiple, set_rate

INTERVAL = 0.5  # seconds between two reports of progress


def train(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    build: Builder = build_model,
    loggers: Sequence[AbstractLogger] = (),
) -> list[dict[str, Any]]:
    """Train the configured model in the run folder `path`; return the rows of its metrics.jsonl.

    With `resume` a run that `path` already holds goes on from its last checkpoint, bit for bit as if it had not
    been interrupted; without it, such a folder is refused. Ctrl-C saves the step in hand and raises `Stopped`.
    """
    run = Run(path)
    try:
        process = start(config.device)
        # A worker that torchrun restarts may have to wait until the killed one is gone.
        held = run.locked(patience=30.0 if process.restarts else 0.0) if process.leads else nullcontext()
        with held:
            return _train(config, run, process, resume or process.restarts > 0, build, loggers)
    except RuntimeError as error:
        if "closed by peer" not in str(error):
            raise
        raise TrainingError("Another process of this run has died; see its own message.") from None
    finally:
        for logger in loggers:
            logger.close()
        finish()


def _train(
    config: Config, run: Run, process: Process, resume: bool, build: Builder, loggers: Sequence[AbstractLogger]
) -> list[dict[str, Any]]:
    choose_algorithms(config.training.deterministic)
    torch.manual_seed(config.seed)
    images, batches, held_out = training_batches(config, process)
    model = place(build(config, images), config, process)
    if process.rank > 0:
        torch.manual_seed(config.seed + process.rank)
    state = State(model, config, process)
    open_run(run, state, resume)
    if config.training.compile:
        cast(Trainable, model).compile_map()
    network = process.wrap(model)
    update: Step = partial(descend, state, network)
    if state.captured:
        update = GraphedStep(update)
    steps = config.training.epochs * len(batches)
    reporter = ProgressReporter(loggers, steps)
    with stopping(active=process.world == 1) as asked_to_stop:
        while state.epoch < config.training.epochs:
            began = time.monotonic() - state.seconds
            network.train()
            for x, target in batches.epoch(state.epoch, start=state.batch):
                multiple = rate_multiple(config.schedule, state.step, steps, len(batches))
                take_step(state, update, x, target, multiple * config.optimizer.lr)
                reporter.report(state)
                every = config.training.checkpoint_steps
                if (every > 0 and state.step % every == 0) or asked_to_stop():
                    state.seconds = time.monotonic() - began
                    save(state, run)
                if asked_to_stop():
                    raise Stopped(f"Stopped after step {state.step}; {run.path} continues with --resume.")
            state.seconds = time.monotonic() - began
            row = finish_epoch(state, run, held_out)
            if process.leads:
                for logger in loggers:
                    logger.log_epoch(row)
    return run.rows()


def choose_algorithms(deterministic: bool) -> None:
    """Fastest algorithms, or those that give the same bits every time."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call itself imports the compiler: seconds
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def open_run(run: Run, state: State, resume: bool) -> None:
    """Bring `state` to where the run stands (its start, or its newest checkpoint), and write down this start of it."""
    newest = run.newest()
    if newest is not None and not resume:
        raise TrainingError(f"{run.path} already holds a run; add --resume to continue it, or --name for another.")
    if newest is not None:
        run.check_same(state.config)
        try:
            state.restore(newest)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {run.advice(newest)}") from None
    if state.process.leads:
        origin = environment(state.config.seed, state.process.device, state.process.world)
        run.begin(state.config, origin, state.epoch, state.step)
    state.process.wait()


def take_step(state: State, update: Step, x: Tensor, target: Tensor, rate: float) -> None:
    """One step of the run on one batch: x (samples, channels, height, width), target labels or probabilities."""
    state.rate = rate
    set_rate(state.optimizer, rate)
    update(x, target)
    if state.average is not None:
        state.average.update(state.model, state.step)
    state.step += 1
    state.batch += 1


def descend(state: State, network: nn.Module, x: Tensor, target: Tensor) -> None:
    """One step of SGD, and its measurements; nothing here waits for the device."""
    settings = state.config.training
    with torch.autocast(x.device.type, torch.bfloat16, enabled=settings.amp):
        logits, solutions = network(x, solutions=True)
    loss = cross_entropy(logits.float(), target, label_smoothing=settings.label_smoothing)
    state.optimizer.zero_grad()
    torch.autograd.backward(loss)
    if settings.clip > 0:
        clip_grad_norm_(state.model.parameters(), settings.clip)
    state.optimizer.step()
    state.accumulator.add(loss.detach(), logits, target, solutions)


@final
class ProgressReporter:
    """Tells the loggers twice a second how the epoch goes, and ends the run if the loss is not a number.

    Reading the sums makes the host wait for the device, hence by the clock and not at every step.
    """

    def __init__(self, loggers: Sequence[AbstractLogger], steps: int):
        self.loggers = loggers
        self.steps = steps
        self.time = time.monotonic()
        self.step = 0

    def report(self, state: State) -> None:
        """Report, if it is time to."""
        now = time.monotonic()
        if now - self.time < INTERVAL:
            return
        scores = state.accumulator.read()
        state.check_loss(scores["loss"])
        taken = state.step - self.step if self.step else 0
        progress = Progress(
            epoch=state.epoch + 1,
            epochs=state.config.training.epochs,
            step=state.step,
            steps=self.steps,
            rate=state.rate,
            images_per_second=taken * state.config.training.batch_size / (now - self.time),
            scores=scores,
        )
        self.time, self.step = now, state.step
        for logger in self.loggers:
            logger.log_progress(progress)


def finish_epoch(state: State, run: Run, held_out: Batches | None) -> dict[str, Any]:
    """Close the epoch and return its row of metrics. All processes must call it together.

    The order matters if a kill falls in between: the row and the best weights first, the checkpoint that
    moves past them last, so that whatever is missing is made again.
    """
    settings = state.config.training
    scores = state.accumulator.read(state.process.total(state.accumulator.sums))
    state.check_loss(scores["loss"])
    with state.average.applied(state.model) if state.average is not None else nullcontext():
        validation = validate(state.model, held_out, state.process, settings.amp) if held_out is not None else None
        diagnostics = cast(Trainable, state.model).diagnostics()
        accuracy = validation["accuracy"] if validation is not None else None
        if accuracy is None or state.best is None or accuracy > state.best:
            state.best = accuracy
            save_best(state, run)
    row = {
        "epoch": state.epoch + 1,
        "step": state.step,
        "rate": state.rate,
        "seconds": round(state.seconds, 3),
        "train": scores,
        "validation": validation,
        "diagnostics": diagnostics,
    }
    state.epoch, state.batch, state.seconds = state.epoch + 1, 0, 0.0
    state.accumulator.reset()
    if state.process.leads:
        run.add_row(row)
    if state.epoch == settings.epochs or state.epoch % settings.checkpoint_epochs == 0:
        save(state, run)
    return row


def save_best(state: State, run: Run) -> None:
    """Write the weights just validated (the average, where there is one), to be evaluated later."""
    state.check_weights()
    if state.process.leads:
        weights = {f"model.{name}": value for name, value in state.model.state_dict().items()}
        checkpoint.save(run.checkpoint("best"), weights, state.facts() | {"epoch": state.epoch + 1})


def save(state: State, run: Run) -> None:
    """Write a checkpoint, unless the weights are no longer numbers. All processes must call it together."""
    state.check_weights()
    tensors = state.tensors()
    if state.process.leads:
        run.save(tensors, state.facts())

"""The training loop: batches → loss → gradient → update of the weights, resumable at any step."""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from ..data import Batches
from ..run import CheckpointError, Run
from ..run.config import Config
from .build import Builder, build_model, class_counts, place, training_batches
from .logger import AbstractLogger
from .metrics import validate
from .optimizer import rate_multiple, set_rate, update_average
from .process import GraphedStep, Process, join_processes, prefetch, wake
from .state import State, Write
from .supervisor import Clock, Supervisor, announce


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
            if not process.leads:
                return _train(config, run, process, resume or process.restarts > 0, build, (), clock)
            # A worker that torchrun restarts may have to wait until the killed one is gone.
            with run.locked(patience=30.0 if process.restarts else 0.0):
                return _train(config, run, process, resume or process.restarts > 0, build, loggers, clock)
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
    settings = config.training
    choose_algorithms(settings.deterministic)
    torch.manual_seed(config.seed)
    clock.lap("device")
    with wake(process.device, settings.amp):
        batches, held_out = training_batches(config, process, partial(announce, loggers))
        clock.lap("data")
        model = place(build(config, batches.images), config, process)
    if process.rank > 0:
        torch.manual_seed(config.seed + process.rank)
    if settings.compile:
        model.compile_map()
    state = State(model, config, process)
    open_run(run, state, batches, held_out, resume, partial(announce, loggers))
    network = process.wrap(model)
    clock.lap("model")

    def update(x: Tensor, target: Tensor) -> None:
        """Update the weights by one batch, and measure it; nothing here waits for the device."""
        with process.autocast(settings.amp):
            logits, solutions = network(x, solutions=True)
        logits_lowered = with_margin(logits.float(), target, settings.margin)
        loss = cross_entropy(logits_lowered, target, label_smoothing=settings.label_smoothing)
        state.optimizer.zero_grad()
        torch.autograd.backward(loss)
        if settings.clip > 0:
            clip_grad_norm_(model.parameters(), settings.clip)
        state.optimizer.step()
        state.accumulator.add(loss.detach(), logits, target, solutions)

    update_once = GraphedStep(update) if state.captured else update
    supervisor = Supervisor(state, run, loggers, clock, len(batches))
    with supervisor.follow():
        while state.epoch < settings.epochs:
            network.train()
            supervisor.begin_epoch()
            for x, target in prefetch(batches.epoch(state.epoch, start=state.batch), process.device):
                multiple = rate_multiple(config.schedule, state.step, supervisor.steps, len(batches))
                state.rate = multiple * config.optimizer.lr
                set_rate(state.optimizer, multiple)
                update_once(x, target)
                if state.average is not None:
                    update_average(state.average, model, settings.ema, state.step)
                state.step += 1
                state.batch += 1
                supervisor.after_step()
            supervisor.end_training()
            supervisor.after_epoch(*finish_epoch(state, run, held_out))
    return run.rows()


def finish_epoch(state: State, run: Run, held_out: Batches | None) -> tuple[dict[str, Any], list[Write]]:
    """Close the epoch; its row of metrics, and what writes its files. All processes must call it together.

    The order matters if a kill falls in between: the row and the best weights first, the checkpoint that
    moves past them last, also where `checkpoint_steps` wants it, so that whatever is missing is made again.
    """
    settings = state.config.training
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
        if better:
            writes += state.best_weights(run)
        diagnostics = state.model.diagnostics()
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
        writes.append(partial(run.add_row, row))
    state.epoch, state.batch, state.seconds = epoch, 0, 0.0
    state.accumulator.reset()
    every = settings.checkpoint_steps
    if last or epoch % settings.checkpoint_epochs == 0 or (every > 0 and state.step % every == 0):
        writes += state.checkpoint(run)
    return row, writes


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
        except CheckpointError as error:
            raise CheckpointError(f"{error} {run.advice(newest)}") from None
    elif begun:
        announce(f"{run.path} has no checkpoint to go on from: it begins anew")
    if state.process.leads:
        run.begin(state.config, classes, counts, state.process.device, state.process.world, state.epoch, state.step)


def choose_algorithms(deterministic: bool) -> None:
    """Fastest algorithms, or those that give the same bits every time."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call itself imports the compiler: seconds
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def with_margin(logits: Tensor, target: Tensor, margin: float) -> Tensor:
    """The logits, that of the true class less by `margin`; with soft targets, each class by its share of it."""
    if margin == 0:
        return logits
    if target.dim() == 1:
        target = target[:, None] == torch.arange(logits.shape[1], device=target.device)
    return logits - margin * target

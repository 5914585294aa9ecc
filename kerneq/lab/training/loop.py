"""The training loop: batches → loss → gradient → step, logged, saved, and resumable at any step."""

import math
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from ...loading import check_settings
from ...solution import NonfiniteInputError
from ..data import Batches
from ..run import CheckpointError, Run, Stopped, TrainingError
from ..run.checkpoint import Writer, read_facts
from ..run.config import Config, write
from .build import Builder, build_model, class_counts, place, training_batches
from .logger import AbstractLogger, Clock, Progress
from .metrics import validate
from .optimizer import rate_multiple, set_rate, update_average
from .process import Process, finish, start, stopping, waking
from .state import State, Write

Step = Callable[[Tensor, Tensor], None]
EAGER_STEPS = 3  # before a step is captured: libraries choose their algorithms, optimizers make their buffers
SHORT, LONG = 60.0, 600.0  # seconds that are no news, and those from which on it also says what takes less
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

    With `resume` a run that `path` already holds goes on from its last checkpoint, bit for bit as if it had not
    been interrupted; without it, such a folder is refused. Ctrl-C saves the step in hand and raises `Stopped`, also
    where that was the last one.
    Where the time went, since `began` if that is given (as `time.monotonic` has it), is told to the loggers and
    written to environment.json.
    """
    run = Run(Path(path))
    clock = Clock(time.monotonic() if began is None else began)
    clock.lap("imports")
    try:
        process = start(config.device)
        # A worker that torchrun restarts may have to wait until the killed one is gone.
        held = run.locked(patience=30.0 if process.restarts else 0.0) if process.leads else nullcontext()
        with held:
            told = loggers if process.leads else ()
            return _train(config, run, process, resume or process.restarts > 0, build, told, clock)
    except RuntimeError as error:
        if "closed by peer" not in str(error) and "reset by peer" not in str(error):
            raise
        raise TrainingError("Another process of this run has died; see its own message.") from None
    finally:
        for logger in loggers:
            logger.close()
        finish()


def _train(
    config: Config,
    run: Run,
    process: Process,
    resume: bool,
    build: Builder,
    loggers: Sequence[AbstractLogger],
    clock: Clock,
) -> list[dict[str, Any]]:
    choose_algorithms(config.training.deterministic)
    torch.manual_seed(config.seed)
    clock.lap("device")

    def announce(text: str) -> None:
        for logger in loggers:
            logger.log_message(text)

    with waking(process.device, config.training.amp):
        batches, held_out = training_batches(config, process, announce)
        clock.lap("data")
        model = place(build(config, batches.images), config, process)
    if process.rank > 0:
        torch.manual_seed(config.seed + process.rank)
    if config.training.compile:
        model.compile_map()
    state = State(model, config, process)
    counts = class_counts(batches.images, None if held_out is None else held_out.images)
    open_run(run, state, batches.images.classes, counts, resume, announce)
    network = process.wrap(model)
    update: Step = partial(descend, state, network)
    if state.captured:
        update = GraphedStep(update)
    steps = config.training.epochs * len(batches)
    every = config.training.checkpoint_steps
    reported = time.monotonic()
    first = state.step
    clock.lap("model")
    stop = stopping(process.world == 1, announce)
    with Writer() as writer, stop as asked_to_stop, in_sentences(state):
        while state.epoch < config.training.epochs:
            began = time.monotonic() - state.seconds
            network.train()
            started = time.monotonic()
            for x, target in made_beside(batches.epoch(state.epoch, start=state.batch), process.device):
                multiple = rate_multiple(config.schedule, state.step, steps, len(batches))
                take_step(state, update, x, target, multiple)
                state.seconds = time.monotonic() - began
                if state.step == first + 1 and process.device.type == "cpu":
                    announce_duration(state, time.monotonic() - started, steps, announce)
                if state.step == first + (EAGER_STEPS + 1 if state.captured else 1):
                    process.synchronise()
                    clock.lap("first steps")
                if time.monotonic() - reported >= INTERVAL:
                    report(state, steps, loggers)
                    reported = time.monotonic()
                stopped = asked_to_stop()  # once: asked between two looks, it would stop without saving this step
                if stopped or (every > 0 and state.step % every == 0 and state.batch < len(batches)):
                    writer.submit(state.checkpoint(run))
                if stopped:
                    raise Stopped(f"Stopped after step {state.step}; {run.path} continues with --resume.")
            process.synchronise()
            state.seconds = time.monotonic() - began
            clock.lap("training")
            row, writes = finish_epoch(state, run, held_out)
            writer.submit(writes)
            for logger in loggers:
                logger.log_epoch(row)
            clock.lap("validation")
    clock.lap("writing")
    if process.leads:
        run.finish(clock.seconds)
    announce(str(clock))
    if asked_to_stop():  # after the last step: whoever called may have more to do than this run
        raise Stopped(f"Stopped after step {state.step}, the last one; {run.path} is complete.")
    return run.rows()


def choose_algorithms(deterministic: bool) -> None:
    """Fastest algorithms, or those that give the same bits every time."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call itself imports the compiler: seconds
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


@contextmanager
def in_sentences(state: State) -> Iterator[None]:
    """What a step may raise that is no bug: a layer on a CPU refuses features that are no numbers, when the run has
    diverged; and PyTorch a batch norm that gets one value of each channel, in the middle of the first step."""
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


def open_run(
    run: Run,
    state: State,
    classes: Sequence[str],
    counts: Sequence[int],
    resume: bool,
    announce: Callable[[str], None],
) -> None:
    """Bring `state` to where the run stands (its start, or its newest checkpoint), and write down this start of it.

    `counts` are the training images of each of the classes, those held out among them.
    """
    newest = run.newest()
    if newest is not None or run.checkpoint("best").exists() or run.rows():
        if not resume:
            raise TrainingError(f"{run.path} already holds a run; add --resume to continue it, or --name for another.")
        run.check_same(state.config)
        run.check_images(classes, counts)
        if newest is None:
            check_expendable(run)
            announce(f"{run.path} has no checkpoint to go on from: it begins anew")
    elif not run.environment():
        for file in (run.path / name for name in ("config.toml", "metrics.jsonl")):
            if file.exists() and file.stat().st_size:
                raise TrainingError(f"{file} is of no run, and would be overwritten: choose another --name.")
    if newest is not None:
        check_settings(
            newest, read_facts(newest), tomllib.loads(write(state.config))
        )  # says itself what to do: nothing is to be removed
        try:
            state.restore(newest)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {run.advice(newest)}") from None
    if state.process.leads:
        run.begin(state.config, classes, counts, state.process.device, state.process.world, state.epoch, state.step)


def check_expendable(run: Run) -> None:
    """Refuse to begin a run anew that has lost its checkpoints.

    One that was killed before its first has no more epochs than lie between two, and makes them again.
    """
    epochs = len(run.rows())
    if run.checkpoint("best").exists() and (run.finished or epochs > run.config().training.checkpoint_epochs):
        raise TrainingError(
            f"{run.path} has its best weights of {epochs} epochs, but no last checkpoint to go on from: it would begin "
            "anew and overwrite them. Start again under another --name."
        )


def made_beside(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches; on a GPU each is made on a stream of its own, beside the step before it."""
    if device.type != "cuda":
        yield from batches
        return
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(here)
    while True:
        with torch.cuda.stream(aside):
            batch = next(batches, None)
        if batch is None:
            return
        here.wait_stream(aside)
        for t in batch:
            t.record_stream(here)
        yield batch


def take_step(state: State, update: Step, x: Tensor, target: Tensor, multiple: float) -> None:
    """One step of the run on one batch: x (samples, channels, height, width), target labels or probabilities.

    `multiple`: of the highest learning rate.
    """
    state.rate = multiple * state.config.optimizer.lr
    set_rate(state.optimizer, multiple)
    update(x, target)
    if state.average is not None:
        update_average(state.average, state.model, state.config.training.ema, state.step)
    state.step += 1
    state.batch += 1


def descend(state: State, network: nn.Module, x: Tensor, target: Tensor) -> None:
    """One step of the optimizer, and its measurements; nothing here waits for the device."""
    settings = state.config.training
    with state.process.autocast(settings.amp):
        logits, solutions = network(x, solutions=True)
    handicapped = with_margin(logits.float(), target, settings.margin)
    loss = cross_entropy(handicapped, target, label_smoothing=settings.label_smoothing)
    state.optimizer.zero_grad()
    torch.autograd.backward(loss)
    if settings.clip > 0:
        clip_grad_norm_(state.model.parameters(), settings.clip)
    state.optimizer.step()
    state.accumulator.add(loss.detach(), logits, target, solutions)


def with_margin(logits: Tensor, target: Tensor, margin: float) -> Tensor:
    """The logits, that of the true class less by `margin`; with soft targets, each class by its share of it."""
    if margin == 0:
        return logits
    if target.dim() == 1:
        target = target[:, None] == torch.arange(logits.shape[1], device=target.device)
    return logits - margin * target


@final
class GraphedStep:
    """Runs `step(x, target)`, the first few times as it is, then as one CUDA graph: hundreds of launches become one.

    The step may not look at a number on the device, and every batch must have the shapes of the first one.
    """

    def __init__(self, step: Step):
        self.step = step
        self.taken = 0
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.x = self.target = torch.empty(0)

    def __call__(self, x: Tensor, target: Tensor) -> None:
        if self.taken < EAGER_STEPS:
            self._eagerly(x, target)
        else:
            if self.graph is None:
                self.x, self.target = x.clone(), target.clone()
                self.graph = self._capture()
            self.x.copy_(x)
            self.target.copy_(target)
            self.graph.replay()
        self.taken += 1

    def _eagerly(self, x: Tensor, target: Tensor) -> None:
        """On a side stream, as the capture will be."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            self.step(x, target)
        here.wait_stream(self.stream)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self.step(self.x, self.target)
        except RuntimeError as error:
            raise TrainingError(
                f"The step cannot be captured as a CUDA graph ({str(error).splitlines()[0]}). A solve may not look at "
                "its residual: set model.check_every to at least max_steps, or training.graph=false."
            ) from None
        return graph


def read_scores(state: State, sums: Tensor) -> dict[str, float | None]:
    """The scores of the epoch so far; a loss that is infinite or NaN ends the run."""
    scores = state.accumulator.read(sums)
    if scores["loss"] is not None and not math.isfinite(scores["loss"]):
        state.refuse(f"The loss became {scores['loss']}")
    return scores


def announce_duration(state: State, seconds: float, steps: int, announce: Callable[[str], None]) -> None:
    """What the rest of the run will take on this CPU, if every step takes so many seconds; nothing if that is soon."""
    left = (steps - state.step) * seconds
    if left < SHORT:
        return
    speed = state.config.training.batch_size / seconds
    hint = "; `kerneq train geq-tiny-cifar10` is small, and a GPU is faster" if left > LONG else ""
    announce(f"about {duration(left)} on this CPU, at {speed:,.0f} images/s{hint}")


def duration(seconds: float) -> str:
    """3 h 20 min, 12 min, 45 s: as precise as a guess can be."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def report(state: State, steps: int, loggers: Sequence[AbstractLogger]) -> None:
    """Tell the loggers how the epoch goes."""
    scores = read_scores(state, state.accumulator.sums)
    settings = state.config.training
    speed = state.batch * settings.batch_size / state.seconds
    progress = Progress(state.epoch + 1, settings.epochs, state.step, steps, state.rate, speed, scores)
    for logger in loggers:
        logger.log_progress(progress)


def finish_epoch(state: State, run: Run, held_out: Batches | None) -> tuple[dict[str, Any], list[Write]]:
    """Close the epoch; its row of metrics, and what writes its files. All processes must call it together.

    The order matters if a kill falls in between: the row and the best weights first, the checkpoint that
    moves past them last, also where `checkpoint_steps` wants it, so that whatever is missing is made again.
    """
    settings = state.config.training
    scores = read_scores(state, state.process.total(state.accumulator.sums))
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

"""The training loop: batches → loss → gradient → step, watched, saved, and resumable at any step."""

import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from kerneq.run.config import Config
from kerneq.training.data import prepare
from kerneq.training.epoch import due, finish_epoch, save
from kerneq.training.errors import Stopped, TrainingError
from kerneq.training.folder import Folder
from kerneq.training.glance import Glance
from kerneq.training.graph import GraphedStep, Step
from kerneq.training.model import Builder, Trainable, build_model, place
from kerneq.training.optimizer import set_rate
from kerneq.training.process import Process, finish, start
from kerneq.training.resume import open_run
from kerneq.training.schedule import multiple
from kerneq.training.state import State
from kerneq.training.stopping import stopping
from kerneq.training.watch import AbstractWatcher, Watchers


def train(
    config: Config,
    path: Path,
    *,
    resume: bool = False,
    build: Builder = build_model,
    watcher: AbstractWatcher | None = None,
) -> list[dict[str, Any]]:
    """Train the configured model in the run folder `path`; return the rows of its metrics.jsonl."""
    folder = Folder(path)
    watcher = watcher if watcher is not None else Watchers()
    try:
        process = start(config.device)
        # A worker that torchrun restarts may have to wait until the killed one is gone.
        held = folder.locked(patience=30.0 if process.restarts else 0.0) if process.leads else nullcontext()
        with held:
            return _train(config, folder, process, resume or process.restarts > 0, build, watcher)
    except RuntimeError as error:
        if "closed by peer" not in str(error):
            raise
        raise TrainingError("Another process of this run has died; see its own message.") from None
    finally:
        watcher.close()
        finish()


def _train(
    config: Config, folder: Folder, process: Process, resume: bool, build: Builder, watcher: AbstractWatcher
) -> list[dict[str, Any]]:
    choose_algorithms(config.training.deterministic)
    torch.manual_seed(config.seed)
    images, batches, held_out = prepare(config, process)
    model = place(build(config, images), config, process)
    if process.rank > 0:
        torch.manual_seed(config.seed + process.rank)
    state = State(model, config, process)
    open_run(folder, state, resume)
    if config.training.compile:
        cast(Trainable, model).compile_map()
    network = process.wrap(model)
    update: Step = partial(descend, state, network)
    if state.captured:
        update = GraphedStep(update)
    steps = config.training.epochs * len(batches)
    glance = Glance(watcher, steps)
    with stopping(active=process.world == 1) as asked_to_stop:
        while state.epoch < config.training.epochs:
            began = time.monotonic() - state.seconds
            network.train()
            for x, target in batches.epoch(state.epoch, start=state.batch):
                factor = multiple(config.schedule, state.step, steps, len(batches))
                take_step(state, update, x, target, factor * config.optimizer.lr)
                glance.look(state)
                if due(state) or asked_to_stop():
                    state.seconds = time.monotonic() - began
                    save(state, folder)
                if asked_to_stop():
                    raise Stopped(f"Stopped after step {state.step}; {folder.path} continues with --resume.")
            state.seconds = time.monotonic() - began
            row = finish_epoch(state, folder, held_out)
            if process.leads:
                watcher.epoch(row)
    return folder.rows()


def take_step(state: State, update: Step, x: Tensor, target: Tensor, rate: float) -> None:
    """One step of the run on one batch."""
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
    state.meter.add(loss.detach(), logits, target, solutions)


def choose_algorithms(deterministic: bool) -> None:
    """Fastest algorithms, or those that give the same bits every time."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call itself imports the compiler: seconds
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic

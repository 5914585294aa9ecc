"""The end of an epoch: its scores, its line in metrics.jsonl, its checkpoints."""

import dataclasses
from contextlib import nullcontext
from typing import Any, cast

from kerneq.data import Batches
from kerneq.training import checkpoint
from kerneq.training.folder import Folder
from kerneq.training.glance import check_loss
from kerneq.training.model import Trainable
from kerneq.training.state import State
from kerneq.training.validate import validate


def finish_epoch(state: State, folder: Folder, held_out: Batches | None) -> dict[str, Any]:
    """Close the epoch and return its line of metrics. All processes must call it together.

    The order matters if a kill falls in between: the line and the best weights first, the checkpoint that
    moves past them last, so that whatever is missing is made again.
    """
    scores = state.meter.read(state.process.total(state.meter.sums))
    check_loss(scores, state)
    with state.average.applied(state.model) if state.average is not None else nullcontext():
        amp = state.config.training.amp
        validation = validate(state.model, held_out, state.process, amp) if held_out is not None else None
        diagnostics = cast(Trainable, state.model).diagnostics()
        better = validation is None or state.best is None or validation.accuracy > state.best
        if better:
            state.best = validation.accuracy if validation is not None else None
            _save_best(state, folder)
    row = {
        "epoch": state.epoch + 1,
        "step": state.step,
        "rate": state.rate,
        "seconds": round(state.seconds, 3),
        "train": dataclasses.asdict(scores),
        "validation": dataclasses.asdict(validation) if validation is not None else None,
        "diagnostics": diagnostics,
    }
    state.epoch, state.batch, state.seconds = state.epoch + 1, 0, 0.0
    state.meter.reset()
    if state.process.leads:
        folder.add_row(row)
    last = state.epoch == state.config.training.epochs
    if last or state.epoch % state.config.training.checkpoint_epochs == 0:
        save(state, folder)
    return row


def _save_best(state: State, folder: Folder) -> None:
    """The weights just validated (the average, where there is one), to be evaluated later."""
    state.check_finite()
    if state.process.leads:
        weights = {f"model.{name}": value for name, value in state.model.state_dict().items()}
        checkpoint.save(folder.checkpoint("best"), weights, state.facts() | {"epoch": state.epoch + 1})


def due(state: State) -> bool:
    """Whether a checkpoint is due in the middle of the epoch."""
    every = state.config.training.checkpoint_steps
    return every > 0 and state.step % every == 0


def save(state: State, folder: Folder) -> None:
    """Write a checkpoint, unless the weights are no longer numbers. All processes must call it together."""
    state.check_finite()
    tensors = state.tensors()
    if state.process.leads:
        folder.save(tensors, state.facts())

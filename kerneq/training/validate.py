"""Loss and accuracy of a model on images it is not trained on."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from kerneq.data import Batches
from kerneq.training.meter import Meter, Scores
from kerneq.training.process import Process


def validate(model: nn.Module, batches: Batches, process: Process, amp: bool) -> Scores:
    """Mean cross-entropy (no label smoothing), accuracy and solves in eval mode, over all processes."""
    meter = Meter(process.device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for x, target in batches.epoch(0):
                if len(x) == 0:  # the last batch may have no image for this process
                    continue
                with torch.autocast(process.device.type, torch.bfloat16, enabled=amp):
                    logits, solutions = model(x, solutions=True)
                meter.add(cross_entropy(logits.float(), target), logits, target, solutions)
    finally:
        model.train(training)
    return meter.read(process.total(meter.sums))

"""The learning rate at every step, as a multiple of its highest value."""

import math

from kerneq.run.config import Schedule


def multiple(schedule: Schedule, step: int, steps: int, steps_per_epoch: int) -> float:
    """The multiple of `optimizer.lr` to use in step number `step` (from 0) of `steps`.

    step       factor^(milestones passed)
    cosine     final + (1 − final)(1 + cos πt)/2,   t: the share of the run after warm-up that is done
    one-cycle  linear from 0 to 1 over the share `rise`, then linear to `final`

    A pure function of the step, so a resumed run needs no other memory than where it is.
    """
    if schedule.kind == "one-cycle":
        peak = schedule.rise * steps
        if step + 1 <= peak:
            return (step + 1) / peak
        return 1 + (schedule.final - 1) * (step + 1 - peak) / max(steps - peak, 1)
    warmup = min(schedule.warmup * steps_per_epoch, steps)
    if step + 1 <= warmup:
        return (step + 1) / warmup
    if schedule.kind == "step":
        return schedule.factor ** sum(step >= share * steps for share in schedule.milestones)
    share = (step - warmup) / max(steps - warmup, 1)
    return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * share)) / 2

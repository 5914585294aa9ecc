import math

import pytest

from kerneq.run.config import Schedule
from kerneq.training.schedule import multiple


def rates(steps: int = 100, **settings) -> list[float]:
    schedule = Schedule(**settings)
    return [multiple(schedule, step, steps, 10) for step in range(steps)]


def test_a_step_schedule_drops_by_its_factor_at_its_milestones():
    got = rates(kind="step", milestones=(0.5, 0.75), factor=0.1)
    assert got[:50] == [1] * 50
    assert got[50:75] == pytest.approx([0.1] * 25)
    assert got[75:] == pytest.approx([0.01] * 25)


def test_a_cosine_falls_from_one_to_its_final_share_by_the_formula():
    got = rates(kind="cosine", final=0.2)
    assert got == pytest.approx([0.2 + 0.8 * (1 + math.cos(math.pi * i / 100)) / 2 for i in range(100)])


def test_warm_up_rises_linearly_for_its_epochs_and_then_the_schedule_begins():
    got = rates(kind="cosine", warmup=2.0)
    assert got[:20] == pytest.approx([(i + 1) / 20 for i in range(20)])
    assert got[20] == 1.0
    assert got == sorted(got[:20]) + sorted(got[20:], reverse=True)


def test_one_cycle_rises_for_its_share_and_ends_at_its_final_share():
    got = rates(kind="one-cycle", rise=0.25, final=0.1)
    assert max(range(100), key=got.__getitem__) == 24
    assert got[24] == 1.0
    assert got[-1] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in zip(got[24:], got[25:], strict=False))


@pytest.mark.parametrize("kind", ["step", "cosine", "one-cycle"])
def test_every_rate_of_a_run_of_one_step_is_positive(kind):
    assert 0 < multiple(Schedule(kind=kind), 0, 1, 1) <= 1

"""MDEQ is an equilibrium like any other: same layer, same solvers, same gradients."""

import pytest
import torch
from zoo_helpers import pictures

from kerneq.gradients import Implicit, Phantom, Unrolled
from kerneq.models import build
from kerneq.solvers import Anderson, Broyden, InFeatures, Picard, Proximal


@pytest.mark.parametrize("solver", [Picard(0.7), Anderson(relaxation=0.7), Broyden()], ids=str)
def test_every_solver_for_maps_runs_on_mdeq_and_comes_nearer(solver):
    residual = {}
    for steps in (2, 40):
        torch.manual_seed(0)
        model = build("mdeq-tiny", settings={"solver": solver, "max_steps": steps}).eval()
        with torch.no_grad():
            _, solutions = model(pictures("mdeq-tiny"), solutions=True)
        residual[steps] = float(solutions["multiscale"].residual.max())
    assert residual[40] < 0.5 * residual[2]


@pytest.mark.parametrize("table", [{"solver": Proximal()}, {"gradient": Implicit(InFeatures())}], ids=str)
def test_what_needs_a_kernel_is_refused_before_there_is_a_model(table):
    with pytest.raises(ValueError, match=r"MDEQ has no kernel, which .* needs: choose Picard, Anderson or Broyden"):
        build("mdeq-tiny", settings=table)


@pytest.mark.parametrize("gradient", [Implicit(max_steps=5, on_failure="return"), Phantom(5), Unrolled(5)], ids=str)
def test_every_gradient_reaches_every_parameter_of_mdeq(gradient):
    model = build("mdeq-tiny", settings={"gradient": gradient})
    model(pictures("mdeq-tiny")).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name


def test_the_row_of_numbers_holds_every_scale_at_half_the_size_of_the_one_before():
    model = build("mdeq-10m")
    cell = model.equilibrium.cell
    x = torch.zeros(2, 32, 16, 8)
    z = cell.initial(cell.bind(x))
    shapes = [tuple(part.shape) for part in cell.unpack(z, x)]
    assert shapes == [(2, 32, 16, 8), (2, 64, 8, 4), (2, 128, 4, 2), (2, 256, 2, 1)]

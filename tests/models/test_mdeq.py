"""MDEQ is an equilibrium like any other: same layer, same solvers, same gradients."""

import pytest
import torch
from zoo_helpers import pictures

import kerneq
from kerneq.cells import AbstractCell
from kerneq.equation import AbstractMap
from kerneq.gradients import Implicit, Phantom, Unrolled
from kerneq.models import build
from kerneq.models.baselines import MultiscaleCell
from kerneq.solvers import Anderson, Broyden, Picard

SOLVERS = {"picard": Picard, "anderson": Anderson, "broyden": Broyden}
GRADIENTS = {"implicit": Implicit, "phantom": Phantom, "unrolled": Unrolled}


def test_mdeq_is_the_same_layer_with_a_cell_of_its_own():
    for name in ("mdeq-tiny", "mdeq-10m"):
        model = build(name)
        assert type(model.equilibrium) is kerneq.Equilibrium
        assert isinstance(model.equilibrium.cell, MultiscaleCell) and isinstance(model.equilibrium.cell, AbstractCell)
        assert isinstance(model.equilibrium.cell.bind(torch.zeros(1, 32, 8, 8)), AbstractMap)


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_for_maps_runs_on_mdeq_and_comes_nearer(solver):
    residual = {}
    for steps in (2, 40):
        torch.manual_seed(0)
        table = {"name": solver} | ({} if solver == "broyden" else {"relaxation": 0.7})
        model = build("mdeq-tiny", settings={"solver": table, "max_steps": steps}).eval()
        assert type(model.equilibrium.solver) is SOLVERS[solver]
        with torch.no_grad():
            _, solutions = model(pictures("mdeq-tiny"), solutions=True)
        residual[steps] = float(solutions["multiscale"].residual.max())
    assert residual[40] < 0.5 * residual[2]


def test_a_solver_that_descends_an_energy_says_that_mdeq_has_none():
    model = build("mdeq-tiny", settings={"solver": {"name": "proximal"}})
    with pytest.raises(TypeError, match=r"needs an equation .* Use `Picard`, `Anderson` or `Broyden`"):
        model(pictures("mdeq-tiny"))


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_every_gradient_reaches_every_parameter_of_mdeq(gradient):
    limit = {"max_steps": 5, "on_failure": "return"} if gradient == "implicit" else {"steps": 5}
    model = build("mdeq-tiny", settings={"gradient": {"name": gradient} | limit})
    assert type(model.equilibrium.gradient) is GRADIENTS[gradient]
    model(pictures("mdeq-tiny")).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name


def test_the_row_of_numbers_holds_every_scale_at_half_the_size_of_the_one_before():
    model = build("mdeq-10m")
    cell = model.equilibrium.cell
    x = torch.zeros(2, 32, 16, 8)
    z = cell.initial(cell.bind(x))
    assert [tuple(part.shape) for part in cell.unpack(z, x)] == [
        (2, 32, 16, 8),
        (2, 64, 8, 4),
        (2, 128, 4, 2),
        (2, 256, 2, 1),
    ]

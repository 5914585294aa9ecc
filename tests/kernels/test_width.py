"""γ: fixed, or following the data in training and frozen in evaluation."""

import copy
import pickle

import pytest
import torch
from helpers import KERNELS, cell_of, input_of, patches

import kerneq
from kerneq.kernels import Adaptive, Gaussian
from kerneq.kernels.radial import Width

pytestmark = pytest.mark.usefixtures("float64")
LIKE = torch.zeros(1, dtype=torch.float64)  # a, whose dtype and device γ has


def smallest_distance(layer: kerneq.Equilibrium, x: torch.Tensor) -> torch.Tensor:
    """M = min over patches of ‖rᵢW_h‖² at the equilibrium, by explicit loops."""
    cell = layer.cell
    with torch.no_grad():
        f = cell.bind(x)
        z = layer(x).value
        r = patches(f.binding.a - f.operator(z), cell.similarity.split, cell.similarity.patch)
        return (r @ cell.similarity.project.weight.mT).square().sum(-1).min()


def layer_of(rule: Adaptive, form: str = "conv") -> kerneq.Equilibrium:
    cell = cell_of(form, Gaussian(gamma=rule, patch=2, split=2, hidden=6))
    return kerneq.Equilibrium(cell, tol=1e-12, max_steps=200)


@pytest.mark.parametrize("form", ["dense", "conv"])
def test_the_first_solve_in_training_sets_gamma_to_the_share_of_the_smallest_distance(form):
    layer, x = layer_of(Adaptive(0.2, floor=1e-12), form), input_of(form)
    M = smallest_distance(layer.eval(), x)
    layer.train()(x)
    torch.testing.assert_close(layer.cell.similarity.width(LIKE), 0.2 / M, rtol=1e-6, atol=0)


def test_later_solves_move_it_by_the_momentum():
    layer, x = layer_of(Adaptive(0.2, momentum=0.25, floor=1e-12)), input_of("conv")
    layer.train()(x)
    first = 0.2 / layer.cell.similarity.width(LIKE)
    second_x = 3 * input_of("conv", seed=9)
    M = smallest_distance(layer.eval(), second_x)
    layer.train()(second_x)
    torch.testing.assert_close(0.2 / layer.cell.similarity.width(LIKE), torch.lerp(first, M, 0.25), rtol=1e-5, atol=0)


def test_it_is_frozen_in_evaluation_and_saved_with_the_model():
    layer, x = layer_of(Adaptive(0.2)), input_of("conv")
    layer.train()(x)
    gamma = layer.cell.similarity.width(LIKE).clone()
    layer.eval()(5 * x)
    assert torch.equal(layer.cell.similarity.width(LIKE), gamma)
    fresh = layer_of(Adaptive(0.2))
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh.cell.similarity.width(LIKE), gamma)
    assert torch.equal(copy.deepcopy(layer).cell.similarity.width(LIKE), gamma)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_it_never_falls_below_the_floor_and_survives_what_is_no_number(bad):
    width = Width(Adaptive(0.2, floor=0.5), 8)
    width.observe(torch.tensor([0.0, 3.0]))
    assert width(LIKE) == pytest.approx(0.2 / 0.75)  # half of the mean, 1.5
    width.observe(torch.tensor([bad, 3.0]))
    assert width(LIKE) == pytest.approx(0.2 / 0.75)


def test_as_published_it_is_the_minimum_itself_over_the_whole_batch():
    kernel = Gaussian(gamma=Adaptive(0.2, floor=0, samples=None), patch=2, split=2, hidden=6)
    layer = kerneq.Equilibrium(cell_of("conv", kernel), tol=1e-12, max_steps=200)
    x = torch.cat([3 * input_of("conv", seed=seed) for seed in range(20)])
    x[-1] *= 0.01  # the smallest patch is in the last sample, which 32 do not reach
    assert len(x) > 32
    M = smallest_distance(layer.eval(), x)
    layer.train()(x)
    torch.testing.assert_close(layer.cell.similarity.width(LIKE), 0.2 / M, rtol=1e-6, atol=0)
    ours = layer_of(Adaptive(0.2, floor=0))
    ours.train()(x)
    assert float(ours.cell.similarity.width(LIKE)) < 0.5 * float(0.2 / M)


def test_without_a_floor_a_patch_at_zero_leaves_gamma_as_it_was():
    width = Width(Adaptive(0.2, floor=0), 8)
    width.observe(torch.tensor([0.5, 3.0]))
    width.observe(torch.tensor([0.0, 3.0]))
    assert width(LIKE) == pytest.approx(0.2 / 0.5)


@pytest.mark.parametrize("wrong", [{"floor": -0.1}, {"samples": 0}])
def test_a_rule_that_cannot_be_is_refused_in_one_sentence(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must .*, got"):
        Adaptive(0.2, **wrong)


def test_a_step_that_moves_gamma_does_not_disturb_a_waiting_backward_pass():
    layer, x = layer_of(Adaptive(0.2)), input_of("conv")
    first = layer.train()(x).value.sum()
    layer(2 * x)
    first.backward()
    assert layer.cell.operator.weight.grad.isfinite().all()


def test_a_number_is_no_part_of_the_state():
    cell = cell_of("dense", Gaussian(gamma=0.5))
    assert cell.similarity.width(LIKE) == 0.5
    assert not any("gamma" in name for name in cell.state_dict())
    assert KERNELS["gaussian"] == Gaussian(gamma=0.5, patch=2, split=2, hidden=6)  # kernels are values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_number_is_as_exact_as_the_computation_whatever_the_weights_were_before(dtype):
    cell = cell_of("dense", Gaussian(gamma=0.2)).bfloat16().to(dtype)
    gamma = cell.bind(input_of("dense").to(dtype)).binding.gamma
    assert torch.equal(gamma, torch.tensor(0.2, dtype=torch.float64 if dtype == torch.float64 else torch.float32))


def test_a_number_is_there_in_a_cell_that_was_made_without_memory():
    cell = cell_of("dense", Gaussian(gamma=0.2))
    with torch.device("meta"):
        empty = cell_of("dense", Gaussian(gamma=0.2))
    empty.to_empty(device="cpu").load_state_dict(cell.state_dict())
    assert empty.bind(input_of("dense")).binding.gamma == 0.2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cell: pickle.loads(pickle.dumps(cell))])
def test_a_number_is_made_once_and_survives_a_copy_and_inference_mode(copied):
    layer, x = kerneq.Equilibrium(cell_of("dense", Gaussian(gamma=0.2))), input_of("dense")
    with torch.inference_mode():
        layer.eval()(x)
    number = layer.cell.similarity.width.number
    layer.train()(x).value.sum().backward()
    assert layer.cell.similarity.width.number is number
    assert copied(layer).cell.similarity.width.number == 0.2


def test_a_kernel_shared_by_two_cells_shares_no_weights():
    kernel = Gaussian(gamma=Adaptive(0.2), split=2, hidden=6)
    one, two = cell_of("conv", kernel, seed=0), cell_of("conv", kernel, seed=1)
    kerneq.Equilibrium(one).train()(input_of("conv"))
    assert one.similarity.project.weight is not two.similarity.project.weight
    assert two.similarity.width(LIKE) != one.similarity.width(LIKE)

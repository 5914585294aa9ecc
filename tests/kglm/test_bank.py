"""Banks of models: the same as one model at a time."""

import pytest
import torch
from bank import ConvBank, DenseBank, Held, Iteration, banded, in_parts, train
from common import Checkpoints
from interpreter import needs_triton, run_interpreted
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kerneq import kglm

CLOSELY = Iteration(tol=1e-13, max_steps=300)


def gaussian(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(models, n=5, m=4):
    W = gaussian(models, n, n, seed=1, scale=0.2), gaussian(models, n, n, seed=2, scale=0.3)
    V = gaussian(models, m, n, seed=3), gaussian(models, m, n, seed=4)
    return DenseBank((*W, *V), torch.tanh, CLOSELY)


def conv(models, c=2, k=3):
    W, V = [
        (gaussian(models, c, c, k, k, seed=s, scale=0.1), gaussian(models, c, c, k, k, seed=s + 1, scale=0.2))
        for s in (1, 3)
    ]
    return ConvBank((*W, *V), torch.tanh, CLOSELY)


@pytest.mark.parametrize("k", [1, 5])
def test_the_banded_matrix_is_the_convolution(k):
    filters, images = gaussian(1, 3, 2, k, k), gaussian(4, 2, 6, 7, seed=1)
    rows = F.pad(images.transpose(1, 2).flatten(2), (0, 0, k // 2, k // 2))
    windows = torch.cat([rows[:, d : d + 6] for d in range(k)], -1)
    got = (windows @ banded(filters, 7)[0]).view(4, 6, 3, 7).transpose(1, 2)
    torch.testing.assert_close(got, F.conv2d(images, filters[0], padding=k // 2))


def test_every_model_of_a_dense_bank_is_at_its_own_equilibrium():
    bank, y = dense(3), gaussian(3, 6, 5, seed=9)
    f, solution = bank(y)
    z = solution.value.view(3, 6, 5)
    for model in range(3):
        drive = z[model] @ bank.W1[model].mT + y[model] @ bank.W2[model].mT
        torch.testing.assert_close(z[model], torch.tanh(drive).detach(), rtol=0, atol=1e-11)
        readout = z[model] @ bank.V1[model].mT + y[model] @ bank.V2[model].mT
        torch.testing.assert_close(f[model], readout, rtol=0, atol=1e-11)


def test_every_model_of_a_convolutional_bank_is_at_its_own_equilibrium():
    bank, y = conv(3), gaussian(4, 2, 6, 5, seed=9)
    f, solution = bank(y)
    z = solution.value.view(3, 4, 6, 2, 5).transpose(2, 3)
    for model in range(3):
        drive = F.conv2d(z[model], bank.W1[model], padding=1) + F.conv2d(y, bank.W2[model], padding=1)
        torch.testing.assert_close(z[model], torch.tanh(drive).detach(), rtol=0, atol=1e-11)
        readout = F.conv2d(z[model], bank.V1[model], padding=1) + F.conv2d(y, bank.V2[model], padding=1)
        torch.testing.assert_close(f[model], readout, rtol=0, atol=1e-11)


def test_a_bank_with_kernel_weights_is_the_kernel_glm():
    X = torch.linspace(0, 4, 12, dtype=torch.float64)
    Y = torch.where(gaussian(5, 12) > 0, 1.0, -1.0).double()
    glm = kglm.KernelGLM(kglm.Matern(), kglm.Ising(), lam=20.0).fit(X, Y)
    W = glm.problem.basis.K[None] / 20.0
    bank = DenseBank((-W, W, -W, W), torch.tanh, CLOSELY)
    torch.testing.assert_close(bank(Y[None])[0][0].detach(), glm.canonical(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("make", [dense, conv])
def test_training_together_is_training_one_by_one(make):
    shared = make is conv
    y = gaussian(4, 2, 6, 5, seed=5) if shared else gaussian(2, 6, 5, seed=5)
    target = gaussian(4, 2, 6, 5, seed=6).expand(2, 4, 2, 6, 5) if shared else gaussian(2, 6, 4, seed=6)
    together = make(2)
    errors = train(together, lambda e: [(y, target)], lambda: [(y, target)], looks=range(3), lr=0.01)
    for model in range(2):
        alone = make(2)
        for name, parameter in list(alone.named_parameters()):
            setattr(alone, name, torch.nn.Parameter(parameter.detach()[model : model + 1].clone()))
        own = (y if shared else y[model : model + 1], target[model : model + 1])
        history = train(alone, lambda e, own=own: [own], lambda own=own: [own], looks=range(3), lr=0.01)
        torch.testing.assert_close(history[:, 0], errors[:, model], rtol=1e-8, atol=1e-10)


def test_a_model_that_fails_leaves_the_others_alone():
    y, target = gaussian(2, 6, 5, seed=5), gaussian(2, 6, 4, seed=6)

    def errors(bad):
        bank = dense(2)
        bank.sigma = torch.relu
        with torch.no_grad():
            bank.V2[1] = bad
        return train(bank, lambda e: [(y, target)], lambda: [(y, target)], looks=range(4), lr=0.01)

    failing, tame = errors(torch.nan), errors(0.0)
    torch.testing.assert_close(failing[:, 0], tame[:, 0], rtol=1e-8, atol=0)
    assert not failing[-1, 1].isfinite() and tame.isfinite().all()


def test_held_weights_stay_as_long_as_they_are_held_and_the_others_learn():
    bank, y, target = dense(2), gaussian(2, 6, 5, seed=5), gaussian(2, 6, 4, seed=6)
    first, second = torch.tensor([True, False]), torch.tensor([False, True])
    held = [Held(first, ("W1", "W2", "b"), epochs=2), Held(second, ("V2",))]

    def moved(epochs):
        before = {name: p.detach().clone() for name, p in bank.named_parameters()}
        train(bank, lambda e: [(y, target)], lambda: [(y, target)], looks=[epochs], lr=0.01, held=held)
        pairs = [(name, model) for name in before for model in range(2)]
        return [
            pair for pair in pairs if not torch.equal(bank.get_parameter(pair[0])[pair[1]], before[pair[0]][pair[1]])
        ]

    assert set(moved(2)) == {("W1", 1), ("W2", 1), ("b", 1), ("V1", 0), ("V1", 1), ("V2", 0), ("c", 0), ("c", 1)}
    assert ("W1", 0) in moved(3) and ("V2", 1) not in moved(3)


@needs_triton
def test_the_triton_programs_are_the_banks():
    run_interpreted("interpreted_banks.py")


def test_a_rectified_output_is_never_negative_and_without_rescue_what_diverges_fails_alone():
    bank, y = conv(2), gaussian(4, 2, 6, 5, seed=9)
    weights = (bank.W1, bank.W2, bank.V1, bank.V2)
    rectified = ConvBank(weights, torch.tanh, CLOSELY, rectified=True)
    assert torch.equal(rectified(y)[0], bank(y)[0].relu())
    wild = bank.W1.detach().clone()
    wild[1] *= 1000
    for rescue in (True, False):
        iteration = Iteration(tol=1e-6, max_steps=200, rescue=rescue)
        both = ConvBank((wild, *weights[1:]), torch.relu, iteration)
        errors = both.error(y, torch.zeros(2, 4, 2, 6, 5))
        assert errors[0].isfinite() and bool(errors[1].isfinite()) is rescue


@pytest.mark.parametrize("anneal_steps", [0, 9])
def test_a_killed_training_goes_on_where_it_was(anneal_steps, tmp_path):
    y, target = gaussian(2, 6, 5, seed=5), gaussian(2, 6, 4, seed=6)

    def run(saved, last, kept=lambda epoch: [(y, target)]):
        bank = dense(2)
        options = {"lr": 0.01, "anneal_steps": anneal_steps, "saved": saved}
        return bank, train(bank, kept, lambda: [(y, target)], looks=range(last + 1), **options)

    bank, whole = run(Checkpoints(None), 6)

    def killed(epoch):
        if epoch == 4:
            raise KeyboardInterrupt
        return [(y, target)]

    with pytest.raises(KeyboardInterrupt):
        run(Checkpoints(tmp_path, "a", seconds=0), 6, killed)
    again, rest = run(Checkpoints(tmp_path, "a"), 6)
    torch.testing.assert_close(rest, whole, rtol=0, atol=0)
    torch.testing.assert_close(again.W1, bank.W1, rtol=0, atol=0)
    assert Checkpoints(tmp_path, "other settings").load("bank") is None


def test_what_a_killed_part_had_done_is_not_taken_for_that_of_other_seeds(tmp_path):
    saved = Checkpoints(tmp_path)

    def killed(seeds, name):
        saved.save(name, {"seeds": torch.tensor(list(seeds))})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_parts(2, 2, saved, killed)
    for seeds in (1, 3):  # fewer, and more, than before: other models
        in_parts(seeds, 2, saved, lambda part, name: {"unfinished": torch.tensor(saved.load(name) is not None)})
        assert not any(saved.load(f"seeds-{part}")["unfinished"] for part in (["0-1"] if seeds == 1 else ["2-3"]))
    assert saved.load("seeds-0-2")["unfinished"]


def test_without_rescue_nothing_waits_for_a_number_and_the_gradients_are_the_same():
    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
            return func(*args, **(kwargs or {}))

    weights = gaussian(4, 2, 6, 6, scale=1 / 6)
    y, target = gaussian(2, 2, 5, 6, seed=1)
    with Waits() as seen:
        bool(torch.ones(()))
    assert seen.count == 1  # the check sees a number that is read
    found = []
    for rescue in (True, False):
        bank = DenseBank(weights, torch.sigmoid, Iteration(tol=1e-13, max_steps=40, rescue=rescue))
        with Waits() as seen:
            bank.error(y, target).sum().backward()
        found.append([p.grad for p in bank.parameters()])
    assert seen.count == 0  # fit for a CUDA graph
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)

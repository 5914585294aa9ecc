"""Kernel GLMs of low rank: against the exact fit, against dense linear algebra, from memmaps, and interrupted."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from glm_data import FAMILIES, targets, uniform

from kerneq import kglm
from kerneq.kglm import design

KERNEL = kglm.Matern(0.7)
EVERY = [*FAMILIES, kglm.Categorical(3)]


def draw(family, n=60, d=1, seed=0):
    X = 3 * uniform(n, d, seed=seed)
    if isinstance(family, kglm.Categorical):
        return X, (3 * uniform(n, seed=5)).floor()
    return X, targets(family, n)


def fit(kernel, family, lam, X, Y, **options):
    return kglm.KernelGLM(kernel, family, lam=lam).fit(X, Y, **options)


@pytest.mark.parametrize("family", EVERY, ids=repr)
def test_with_all_samples_as_centres_it_is_the_exact_fit(family):
    X, Y = draw(family)
    X2, c = 3 * uniform(9, 1, seed=3), 0.2 + uniform(60, seed=2)
    exact = fit(KERNEL, family, 0.3, X, Y, weights=c, offset=0.1 * X[:, 0])
    found = fit(kglm.Nystrom(KERNEL, X), family, 0.3, X, Y, weights=c, offset=0.1 * X[:, 0], tol=1e-9)
    torch.testing.assert_close(found.canonical(X2), exact.canonical(X2), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.predict(), exact.predict(), rtol=0, atol=1e-5)
    assert found.result.converged.all()


@pytest.mark.parametrize("family", EVERY, ids=repr)
def test_few_centres_are_the_exact_fit_of_the_low_rank_kernel(family):
    """The dense matrix of k̃, fitted by the exact method, whose code is another; the error bound holds as well."""
    X, Y = draw(family)
    X2 = 3 * uniform(9, 1, seed=3)
    found = fit(kglm.Nystrom(KERNEL, centres=8), family, 0.3, X, Y, tol=1e-9)
    features = found.reduced.features
    dense = fit(lambda A, B: features(A, B), family, 0.3, X, Y)
    torch.testing.assert_close(found.canonical(X2), dense.canonical(X2), rtol=0, atol=1e-6)
    w = features.map(X).mT @ (dense.result.coefficients[0] if family.vector else dense.result.coefficients.mT)
    assert (found.result.coefficients[0].view_as(w) - w).norm() <= found.result.error.norm() + 1e-9
    if not family.vector:
        torch.testing.assert_close(found.log_evidence(), dense.log_evidence(), rtol=1e-6, atol=0)


def test_the_posterior_is_that_of_the_exact_fit_with_all_centres_and_the_prior_far_from_few():
    X, Y = draw(kglm.Bernoulli())
    X2 = torch.tensor([[0.5], [40.0]], dtype=torch.float64)
    exact = fit(KERNEL, kglm.Bernoulli(), 0.3, X, Y).posterior(X2)
    all_centres = fit(kglm.Nystrom(KERNEL, X), kglm.Bernoulli(), 0.3, X, Y, tol=1e-10).posterior(X2)
    torch.testing.assert_close(all_centres.covariance, exact.covariance, rtol=0, atol=1e-6)
    few = fit(kglm.Nystrom(KERNEL, centres=5), kglm.Bernoulli(), 0.3, X, Y).posterior(X2)
    assert few.deviation[1] ** 2 == pytest.approx(1 / 0.3, rel=1e-6) and few.deviation.shape == (2,)
    with pytest.raises(ValueError, match="not Categorical"):
        fit(kglm.Nystrom(KERNEL, 5), kglm.Categorical(), 0.3, X, Y).posterior(X2)


@pytest.mark.parametrize("family", [kglm.Bernoulli(), kglm.Poisson(), kglm.Gaussian(0.5), kglm.Categorical()], ids=repr)
def test_sampled_preconditioner_gram_matrices_and_blocks_made_again_agree(family, monkeypatch):
    X, Y = draw(family, n=400, d=2)
    plan = kglm.Nystrom(KERNEL, centres=30)
    by_gram = fit(plan, family, 0.1, X, Y, tol=1e-9)
    monkeypatch.setattr(design, "GRAM", 0)
    by_products = fit(plan, family, 0.1, X, Y, tol=1e-9)
    small = dataclasses.replace(plan, memory=50 * 30 * 8)
    by_blocks = fit(small, family, 0.1, X, Y, tol=1e-9)
    assert not by_blocks.reduced.design.keeps and by_blocks.reduced.design.rows == 12
    for other in (by_products, by_blocks):
        torch.testing.assert_close(other.canonical(), by_gram.canonical(), rtol=0, atol=1e-6)


def test_several_data_sets_at_the_same_coordinates_are_fitted_together():
    X, Y = 3 * uniform(40, 1), targets(kglm.Poisson(), 3, 40)
    together = fit(kglm.Nystrom(KERNEL, 10), kglm.Poisson(), 0.2, X, Y)
    assert together.predict(X).shape == (3, 40)
    alone = fit(kglm.Nystrom(KERNEL, 10), kglm.Poisson(), 0.2, X, Y[1])
    torch.testing.assert_close(together.canonical(X)[1], alone.canonical(X), rtol=0, atol=1e-5)


def test_the_memory_given_bounds_what_is_kept_and_made_at_once():
    X, Y = draw(kglm.Bernoulli(), n=300, d=2)
    for memory, keeps, rows in ((2**20, True, 1638), (300 * 20 * 8 - 1, False, 74), (1, False, 1)):
        glm = fit(kglm.Nystrom(KERNEL, 20, memory=memory), kglm.Bernoulli(), 1.0, X[:300], Y)
        assert (glm.reduced.design.keeps, glm.reduced.design.rows) == (keeps, rows)
        assert sum(len(block) for block in glm.reduced.design._kept) == (300 if keeps else 0)


@pytest.mark.parametrize("rule", ["kmeans", "leverage", "uniform"])
def test_every_rule_gets_better_with_more_centres_and_states_its_error(rule):
    X, Y = draw(kglm.Bernoulli(), n=300, d=2)
    exact = fit(KERNEL, kglm.Bernoulli(), 0.5, X, Y)
    K, before = KERNEL(X, X), np.inf
    for centres in (10, 40, 160):
        glm = fit(kglm.Nystrom(KERNEL, centres, rule), kglm.Bernoulli(), 0.5, X, Y)
        stated = glm.reduced.approximation()
        missed = K - glm.reduced.features(X, X)
        assert stated.trace == pytest.approx(missed.trace().item()) and stated.trace < before
        assert stated.norm == pytest.approx(torch.linalg.eigvalsh(missed)[-1].item(), rel=1e-6)
        sampled = glm.reduced.approximation(100)
        assert 0.5 * stated.trace < sampled.trace < 2 * stated.trace
        centred = glm.reduced.features.centres  # ‖f̃ − f*‖² in the kernel's space, from both coefficients
        a, b = glm.reduced.features.to_raw(glm.result.coefficients[0]), exact.result.coefficients[0]
        square = a @ KERNEL(centred, centred) @ a + b @ K @ b - 2 * a @ KERNEL(centred, X) @ b
        assert square.clamp(min=0).sqrt() <= stated.fit + 1e-6
        assert (glm.canonical() - exact.canonical()).abs().max() <= stated.fit
        before = stated.trace


def test_random_features_approach_their_kernel():
    X, Y = draw(kglm.Bernoulli(), n=200, d=3)
    for kernel in (kglm.SquaredExponential(1.5), kglm.Matern(2.0, 1.5), kglm.Matern(2.0, 0.5)):
        glm = fit(kglm.RandomFeatures(kernel, 400), kglm.Bernoulli(), 1.0, X, Y)
        features = glm.reduced.features
        torch.testing.assert_close(features(X, X).diagonal(), torch.ones(200, dtype=X.dtype))
        assert (features(X, X) - kernel(X, X)).abs().max() < 0.3
        exact = fit(kernel, kglm.Bernoulli(), 1.0, X, Y)
        assert (glm.predict() - exact.predict()).abs().max() < 0.1
        assert glm.reduced.approximation().fit is None
    with pytest.raises(TypeError, match="for others use `Nystrom`"):
        kglm.RandomFeatures(kglm.DotProduct())


@pytest.mark.parametrize("family", [kglm.Bernoulli(), kglm.Poisson(), kglm.Gaussian(0.5), kglm.Categorical()], ids=repr)
@pytest.mark.parametrize("lam", [0.05, 50.0])
def test_the_equilibrium_in_features_is_the_kernel_glm(family, lam):
    """Theorem 3 and Corollary 6 for k̃, solved for r numbers, with its error bound; a layer that can be trained."""
    X, Y = draw(family, n=40)
    X2, c = 3 * uniform(7, 1, seed=3), 0.2 + uniform(40, seed=2)
    glm = fit(kglm.Nystrom(KERNEL, 8), family, lam, X, Y, weights=c, offset=0.1 * X[:, 0], tol=1e-10)
    layer = glm.as_equilibrium(X2)
    Ys = torch.stack([Y, Y.flip(0)])
    f = layer(Ys)
    torch.testing.assert_close(f[0].detach(), glm.canonical(X2), rtol=0, atol=1e-6)
    torch.testing.assert_close(layer.mean(Ys)[0].detach(), glm.predict(X2), rtol=0, atol=1e-5)
    w = layer.embed(Ys).detach()
    assert w.shape[:2] == (2, 8) and layer.error_bound(Ys, w).max() < 1e-6
    off = w + 0.1
    assert ((off - w).flatten(1).norm(dim=1) <= layer.error_bound(Ys, off) + 1e-9).all()
    assert layer.guarantee.semidefinite and not layer.guarantee.assumption1
    f.square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in layer.parameters())
    at_inner = glm.as_equilibrium()(Y[None])[0].detach()
    torch.testing.assert_close(at_inner, glm.canonical(), rtol=0, atol=1e-6)


def test_the_layers_gradients_are_those_of_finite_differences():
    X, Y = draw(kglm.Bernoulli(), n=9)
    layer = fit(kglm.Nystrom(KERNEL, 3), kglm.Bernoulli(), 0.5, X, Y).as_equilibrium(X[:2])
    parameters = dict(layer.named_parameters())

    def run(*values):
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (Y[None],))

    given = tuple(p.detach().clone().requires_grad_() for p in parameters.values())
    assert torch.autograd.gradcheck(run, given, atol=1e-5)


@pytest.mark.parametrize("family", [kglm.Bernoulli(), kglm.Categorical()], ids=repr)
def test_a_memmap_gives_the_same_numbers_as_the_tensor(family, tmp_path):
    X, Y = draw(family, n=200, d=3)
    np.save(tmp_path / "X.npy", X.numpy())
    rows = np.load(tmp_path / "X.npy", mmap_mode="r")
    plan = kglm.Nystrom(KERNEL, 20, memory=20 * 8 * 40)
    there, here = fit(plan, family, 0.1, rows, Y), fit(plan, family, 0.1, X, Y)
    torch.testing.assert_close(there.predict(rows[:50]), here.predict(X[:50]), rtol=0, atol=1e-12)


class Batch:
    """As those of Arrow: no array, but it can make one."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype=dtype)


def test_batches_of_any_reader_become_one_memmap(tmp_path):
    X = (3 * uniform(1234, 3)).numpy()
    rows = kglm.save_rows(tmp_path / "X.npy", (Batch(X[i : i + 100]) for i in range(0, 1234, 100)))
    assert isinstance(rows, np.memmap) and rows.shape == (1234, 3)
    np.testing.assert_array_equal(rows, X)
    assert [path.name for path in tmp_path.iterdir()] == ["X.npy"]
    with pytest.raises(ValueError, match=r"Chunks must be \(k, 3\), got shape \(5, 2\)"):
        kglm.save_rows(tmp_path / "Y.npy", [X[:5], X[:5, :2]])
    with pytest.raises(ValueError, match="one chunk of rows at least"):
        kglm.save_rows(tmp_path / "Y.npy", [])


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_are_read_in_chunks(suffix, tmp_path):
    pa = pytest.importorskip("pyarrow")
    X, path = (3 * uniform(500, 2)).numpy(), tmp_path / f"trips.{suffix}"
    table = pa.table({"x": X[:, 0], "city": ["a"] * 500, "y": X[:, 1], "n": pa.array([None, *range(499)])})
    if suffix == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=100)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table, max_chunksize=100)
    chunks = list(kglm.read_table(path, ["x", "y"]))
    assert suffix == "parquet" or [len(chunk) for chunk in chunks] == [100] * 5
    np.testing.assert_array_equal(kglm.save_rows(tmp_path / "X.npy", chunks), X)
    assert np.isnan(next(kglm.read_table(path, ["n"]))[0, 0])
    with pytest.raises(ValueError, match="column 'city' has no numbers .string.: name others in `columns`"):
        list(kglm.read_table(path))


def test_tables_without_pyarrow_are_answered_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match="needs pyarrow: install it by"):
        next(kglm.read_table("trips.parquet"))


@pytest.mark.parametrize("plan", [kglm.Nystrom(KERNEL, 20), KERNEL], ids=["low rank", "exact"])
def test_an_interrupted_fit_goes_on_where_it_was(plan, tmp_path):
    X, Y = draw(kglm.Bernoulli(), n=200, d=2)
    file, seen = tmp_path / "fit.safetensors", []

    def stop(progress):
        seen.append(progress)
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(plan, kglm.Bernoulli(), 1e-3, X, Y, checkpoint=file, progress=stop)
    assert "step 3: J = " in str(seen[-1]) and "left" in str(seen[-1])
    steps = []
    resumed = fit(plan, kglm.Bernoulli(), 1e-3, X, Y, checkpoint=file, progress=lambda p: steps.append(p.step))
    whole = fit(plan, kglm.Bernoulli(), 1e-3, X, Y)
    assert steps[0] == 4
    torch.testing.assert_close(resumed.canonical(), whole.canonical(), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="checkpoint of another fit"):
        fit(plan, kglm.Bernoulli(), 1e-3, X, 1 - Y, checkpoint=file)
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a checkpoint of a fit"):
        fit(plan, kglm.Bernoulli(), 1e-3, X, Y, checkpoint=file)


@pytest.mark.parametrize("kernel", [KERNEL, kglm.Nystrom(KERNEL, 25)], ids=["exact", "low rank"])
def test_a_path_starts_from_the_last_solution_and_stops_where_held_out_data_say_so(kernel):
    X, Y = draw(kglm.Bernoulli(), n=80)
    held_out = draw(kglm.Bernoulli(), n=80, seed=9)
    glm = kglm.KernelGLM(kernel, kglm.Bernoulli(), lam=1.0)
    path = glm.path(X, Y, [0.01, 1.0, 0.1, 10.0])
    assert [m.lam for m in path.models] == [10.0, 1.0, 0.1, 0.01] and path.best is path.models[-1]
    for model in path.models:
        alone = fit(kernel, kglm.Bernoulli(), model.lam, X, Y)
        torch.testing.assert_close(model.canonical(), alone.canonical(), rtol=0, atol=1e-4)
    stopped = glm.path(X, Y, [10.0**-k for k in range(-3, 6)], validation=held_out, patience=2)
    assert len(stopped.models) < 9 and stopped.losses.index(min(stopped.losses)) == len(stopped.losses) - 3
    assert stopped.best.loss(*held_out) == min(stopped.losses)


def test_float32_data_are_fitted_as_well_as_float32_allows_or_it_warns():
    X, Y = draw(kglm.Bernoulli(), n=300, d=2)
    kernel = kglm.SquaredExponential(1.0)
    wide = fit(kglm.Nystrom(kernel, 50), kglm.Bernoulli(), 1.0, X, Y).predict()
    narrow = fit(kglm.Nystrom(kernel, 50), kglm.Bernoulli(), 1.0, X.float(), Y.float()).predict()
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=0, atol=1e-3)
    with pytest.warns(RuntimeWarning, match="not solved.*off by .*Raise `lam`, use float64"):
        fit(kglm.Nystrom(kernel, 50), kglm.Bernoulli(), 1e-5, X.float(), Y.float())
    assert fit(kglm.Nystrom(kernel, 50), kglm.Bernoulli(), 1e-7, X, Y).result.converged.all()


def test_the_scaled_kernel_of_appendix_h_has_features_too():
    X, Y = draw(kglm.Poisson())
    kernel = kglm.Scaled(KERNEL, lambda x: x[:, 0].cos())
    found = fit(kglm.Nystrom(kernel, X), kglm.Poisson(), 0.3, X, Y, tol=1e-9)
    torch.testing.assert_close(found.predict(), fit(kernel, kglm.Poisson(), 0.3, X, Y).predict(), rtol=0, atol=1e-5)


def test_bad_input_is_answered_in_words_or_has_a_stated_fallback():
    X, Y = draw(kglm.Bernoulli())
    plan, bernoulli = kglm.Nystrom(KERNEL, 10), kglm.Bernoulli()
    broken = X.clone()
    broken[7] = torch.nan
    with pytest.raises(ValueError, match="Coordinates must be finite"):
        fit(plan, bernoulli, 1.0, broken, Y)
    with pytest.raises(ValueError, match="Targets must be finite"):
        fit(plan, bernoulli, 1.0, X, broken[:, 0])
    with pytest.raises(ValueError, match=r"Targets must be \(n,\) or \(batch, n\) with n = 60"):
        fit(plan, bernoulli, 1.0, X, Y[:5])
    with pytest.raises(ValueError, match="`weights` must be 60 finite numbers"):
        fit(plan, bernoulli, 1.0, X, Y, weights=Y[:5])
    with pytest.raises(ValueError, match="one sample at least"):
        fit(plan, bernoulli, 1.0, X[:0], Y[:0])
    with pytest.raises(ValueError, match=r"must be \(m, 1\), as the others are, got shape \(3, 2\)"):
        fit(plan, bernoulli, 1.0, X, Y).predict(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="`lam` must be positive"):
        fit(plan, bernoulli, 0.0, X, Y)
    with pytest.raises(ValueError, match="`rule` must be one of kmeans, leverage, uniform"):
        kglm.Nystrom(KERNEL, 10, "best")
    with pytest.raises(ValueError, match="`centres` must be a whole number"):
        kglm.Nystrom(KERNEL, 0)
    with pytest.raises(ValueError, match="after `KernelGLM.fit` only"):
        plan(X, X)
    with pytest.raises(ValueError, match="low rank, such as `Nystrom`"):
        fit(KERNEL, bernoulli, 1.0, X, Y, group=object())
    with pytest.raises(RuntimeError, match="no fit in features"):
        _ = fit(KERNEL, bernoulli, 1.0, X, Y).reduced
    with pytest.raises(ValueError, match="not positive semi-definite on the centres"):
        fit(kglm.Nystrom(lambda A, B: -KERNEL(A, B), 10), bernoulli, 1.0, X, Y)
    with pytest.warns(UserWarning, match="500 centres are more than the 60 samples"):
        many = fit(kglm.Nystrom(KERNEL, 500), bernoulli, 1.0, X, Y)
    torch.testing.assert_close(many.predict(), fit(KERNEL, bernoulli, 1.0, X, Y).predict(), rtol=0, atol=1e-5)
    twice = fit(kglm.Nystrom(KERNEL, torch.cat([X[:10], X[:10]])), bernoulli, 1.0, X, Y)  # duplicate centres
    once = fit(kglm.Nystrom(KERNEL, X[:10]), bernoulli, 1.0, X, Y)
    assert twice.reduced.features.jitter > 0
    torch.testing.assert_close(twice.predict(), once.predict(), rtol=0, atol=1e-4)
    constant = torch.cat([X, torch.full_like(X, 3.0)], 1)  # a constant column, and samples that are all equal
    torch.testing.assert_close(fit(plan, bernoulli, 1.0, constant, Y).predict().mean(), Y.mean(), rtol=0.2, atol=0)
    assert fit(plan, bernoulli, 1.0, 0 * X, Y).result.converged.all()


@pytest.mark.parametrize("gram", [0, 1000])
def test_centres_far_closer_than_the_kernel_is_wide_are_no_harm(gram, monkeypatch):
    """The kernel of the centres is singular to rounding, and R is 10⁶: nothing may be multiplied by R twice."""
    monkeypatch.setattr(design, "GRAM", gram)
    X = uniform(3000, 2)
    Y = (4 * (X[:, 0] - X[:, 1]) + 2 * uniform(3000, seed=1) > 1).double()
    glm = fit(kglm.Nystrom(kglm.SquaredExponential(1.0), 200), kglm.Bernoulli(), 0.1, X, Y)
    few = fit(kglm.Nystrom(kglm.SquaredExponential(1.0), 60), kglm.Bernoulli(), 0.1, X, Y)
    assert glm.result.converged.all() and glm.reduced.features.root.norm() > 1e6
    torch.testing.assert_close(glm.predict(), few.predict(), rtol=0, atol=1e-3)


def test_counts_of_a_million_are_fitted():
    X = 3 * uniform(80, 1)
    Y = (13 + X[:, 0].sin()).exp().round()
    glm = fit(kglm.Nystrom(KERNEL, X), kglm.Poisson(), 1.0, X, Y)
    assert glm.result.converged.all() and (glm.predict() / Y - 1).abs().max() < 0.01
    torch.testing.assert_close(glm.predict(), fit(KERNEL, kglm.Poisson(), 1.0, X, Y).predict(), rtol=1e-4, atol=0)


DISTRIBUTED = Path(__file__).with_name("distributed_fit.py")


@pytest.mark.parametrize("processes", [2, 4])
def test_rows_over_two_and_four_processes_give_the_model_of_one(processes):
    """Bernoulli, Poisson and Categorical, with and without the sampled preconditioner; gloo."""
    command = [sys.executable, str(DISTRIBUTED), str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_a_killed_worker_is_started_again_by_torchrun_and_the_fit_goes_on(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*torchrun, str(DISTRIBUTED), "elastic", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fit.safetensors").exists()

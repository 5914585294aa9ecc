"""The same sample, the same logits: whatever the batch, the memory layout, the precision, compiled or not."""

import pytest
import torch
from zoo_helpers import KINDS, digits, pictures, trained

from kerneq.models import build


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_has_the_same_logits_in_every_batch(name):
    model = trained(name)
    x, _ = digits()
    x = x[1000:1024]
    x[3] *= 20  # a sample much harder than its neighbours must not change them
    with torch.no_grad():
        together = model(x)
        alone = torch.cat([model(sample.unsqueeze(0)) for sample in x])
        order = torch.randperm(len(x))
        shuffled = torch.empty_like(together)
        for rows in order.split(7):
            shuffled[rows] = model(x[rows])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shuffled, together, rtol=1e-5, atol=1e-5)


def test_a_sample_has_the_same_logits_in_every_batch_at_full_width():
    model = build("geq-5m").eval()
    x = pictures("geq-5m", batch=3)
    with torch.no_grad():
        together = model(x)
        alone = torch.cat([model(sample.unsqueeze(0)) for sample in x])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_evaluation_changes_nothing_in_the_model_and_gradients_nothing_in_its_logits(name):
    model = trained(name)
    x, _ = digits()
    with torch.no_grad():
        plain = model(x[:8])
        before = {key: value.clone() for key, value in model.state_dict().items()}
        model(x[8:40])
    with torch.inference_mode():
        torch.testing.assert_close(model(x[:8]), plain, rtol=0, atol=0)
    for key, value in model.state_dict().items():
        assert bool(torch.equal(value, before[key])), key
    if not name.startswith("mdeq"):  # its phantom gradient moves the value on by some steps
        torch.testing.assert_close(model(x[:8]).detach(), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_channels_last_gives_the_same_logits_and_finite_gradients(name):
    model = trained(name)
    x, _ = digits()
    with torch.no_grad():
        plain = model(x[:16])
    model = model.to(memory_format=torch.channels_last)
    logits, solutions = model(x[:16].to(memory_format=torch.channels_last), solutions=True)
    # Sums run in another order; a solve may then stop one step earlier or later, within its tolerance, and MDEQ's,
    # which has no guarantee, somewhere near.
    torch.testing.assert_close(logits.detach(), plain, rtol=1e-3, atol=3e-2 if name.startswith("mdeq") else 1e-3)
    logits.square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    for solution in solutions.values():
        if solution.value.dim() == 4:
            assert solution.value.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_autocast_gives_nearly_the_same_logits_and_finite_gradients(name):
    model = trained(name)
    x, _ = digits()
    with torch.no_grad():
        plain = model(x[:8])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, solutions = model(x[:8], solutions=True)
        loss = logits.float().square().mean()
    loss.backward()
    assert float((logits.detach() - plain).norm() / plain.norm()) < (0.15 if name.startswith("mdeq") else 0.03)
    for parameter in model.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert bool(parameter.grad.isfinite().all())
    for solution in solutions.values():
        assert solution.value.dtype == torch.bfloat16
        assert bool(solution.residual.isfinite().all()) and solution.residual.dtype == torch.float32


def test_a_model_trains_under_bfloat16_autocast():
    model = build("geq-dense-tiny", channels=1)
    x, y = digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x[:24]), y[:24])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("solver", ["proximal", "anderson", "broyden"])
def test_a_solve_takes_the_same_steps_in_either_layout_when_samples_finish_early(solver):
    """Samples that leave the computation must not scramble the history of those that stay."""
    settings = {"solver": {"name": solver}, "norm": 0.97, "tol": 1e-9, "max_steps": 200}
    model = build("opteq-tiny", settings=settings).double().eval()
    with torch.no_grad():  # long enough for the bound to bite
        model.branches[0].equilibrium.cell.operator.weight.mul_(10)
        x = pictures("opteq-tiny", batch=8).double()
        x[:3] = 0  # done first
        plain = model(x, solutions=True)[1]["branch0"]
        model = model.to(memory_format=torch.channels_last)
        last = model(x.to(memory_format=torch.channels_last), solutions=True)[1]["branch0"]
    assert int(plain.steps.min()) < int(plain.steps.max())
    assert int((plain.steps - last.steps).abs().max()) <= 1
    assert last.value.is_contiguous(memory_format=torch.channels_last)

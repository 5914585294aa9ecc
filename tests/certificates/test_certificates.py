"""Certificates: exact where there is a closed form, and never broken by an attack, whatever the weights."""

import math

import pytest
import torch
from torch import nn

import kerneq as kq
from kerneq import certify
from kerneq.certificates import chain as chain_module
from kerneq.kernels import Gaussian, Linear, Multiquadric
from kerneq.operators import Settled

SMALL = {"width": 8, "features": [8, 8], "scales": [1, 2], "fusion": 2}
FOLDED = {"stem": "imagenet", "width": 16, "features": [8], "scales": [1], "fusion": 1, "lipschitz": True, "gain": 4.0}


def dense(kernel, norm: float, *, seed: int = 0) -> kq.models.DenseClassifier:
    torch.manual_seed(seed)
    settings = {"kernel": kernel, "size": 4, "width": 12, "features": 8, "norm": norm}
    return scrambled(kq.models.build("geq-dense-tiny", classes=3, channels=1, settings=settings))


def convolutional(kernel, norm: float, *, seed: int = 0, **more) -> kq.models.Classifier:
    torch.manual_seed(seed)
    settings = {"kernel": kernel, "norm": norm, "stem": "plain"} | SMALL | more
    return scrambled(kq.models.build("geq-tiny", classes=3, channels=1, settings=settings))


def scrambled(model):
    """In eval(), with batch norms that shift and stretch: some of their gains are negative."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.2, 2)
            module.weight.data.normal_(std=1.0)
            module.bias.data.normal_()
    return model.double().eval()


MODELS = {
    "dense gaussian": lambda seed: dense(Gaussian(0.5, split=4, hidden=6), 1.3, seed=seed),
    "dense multiquadric": lambda seed: dense(Multiquadric(0.5, split=4, hidden=6), 5.0, seed=seed),
    "gaussian": lambda seed: convolutional(Gaussian(0.5, split=4, hidden=8), 1.0, seed=seed, fusion=1),
    "linear features": lambda seed: convolutional(Linear(), 0.8, seed=seed, output="features"),
    "concatenated": lambda seed: convolutional(Linear(), 0.8, seed=seed, join="concatenate"),
    "lipschitz": lambda seed: convolutional(Multiquadric(0.2, split=4, hidden=8), 2.0, seed=seed, **FOLDED),
}


def pictures(model, count: int, seed: int = 1) -> torch.Tensor:
    """Random pictures, among which the model, by its bias, prefers no class."""
    side = model.side or 8
    x = torch.randn(count, 1, side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        model.head.bias -= model(x).mean(0)
    return x


def sharpened(model):
    """Solved and differentiated so exactly that what an attack sees is the model."""
    for layer in model.layers():
        layer.solver, layer.tol, layer.max_steps = kq.solvers.Proximal(), 1e-8, 200
        layer.gradient = kq.gradients.Implicit(kq.gradients.InFeatures(), tol=1e-3, max_steps=30, on_failure="return")
    return model


def attack(model, x, predicted, radius, *, steps: int = 6, restarts: int = 2) -> torch.Tensor:
    """The largest lead of another class that projected gradient ascent finds in the ℓ2 ball, (batch,)."""
    noise = torch.Generator().manual_seed(0)
    best = torch.full((len(x),), -torch.inf, dtype=x.dtype)
    radius = radius.view(-1, 1, 1, 1)

    def lead(at):
        logits = model(at)
        own = logits.gather(1, predicted[:, None])[:, 0]
        return logits.scatter(1, predicted[:, None], -torch.inf).amax(1) - own

    for _ in range(restarts):
        offset = torch.randn(x.shape, generator=noise, dtype=x.dtype)
        offset = offset / offset.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        for step in range(steps):
            at = (x + radius * offset).requires_grad_()
            value = lead(at)
            best = torch.maximum(best, value.detach())
            (g,) = torch.autograd.grad(value.sum(), at)
            g = g / g.flatten(1).norm(dim=1).clamp_min(1e-30).view(-1, 1, 1, 1)
            offset = offset + (0.5 if step < steps // 2 else 0.1) * g
            offset = offset / offset.flatten(1).norm(dim=1).clamp_min(1).view(-1, 1, 1, 1)
        with torch.no_grad():
            best = torch.maximum(best, lead(x + radius * offset))
    return best


@pytest.mark.parametrize("name", MODELS)
def test_no_attack_changes_a_prediction_inside_its_radius(name):
    model = MODELS[name](0)
    x = pictures(model, 4)
    certificate = certify(model, x)
    assert certificate.unique and (certificate.radius > 0).all()
    sharpened(model)
    assert torch.equal(model(x).argmax(1), certificate.prediction)
    assert (attack(model, x, certificate.prediction, certificate.radius) < 0).all()
    crossings = boundary(model, x, certificate.prediction)
    assert crossings.isfinite().any() and (certificate.radius <= crossings).all()


@torch.no_grad()
def boundary(model, x, predicted) -> torch.Tensor:
    """How far from each picture its prediction changes on the way to the nearest other of another class, (batch,)."""
    nearest = torch.full((len(x),), torch.inf, dtype=x.dtype)
    for i in range(len(x)):
        others = x[predicted != predicted[i]]
        low, high = torch.zeros(len(others)).double(), torch.ones(len(others)).double()
        for _ in range(15 if len(others) else 0):
            middle = (low + high) / 2
            same = model(torch.lerp(x[i].expand_as(others), others, middle.view(-1, 1, 1, 1))).argmax(1) == predicted[i]
            low, high = torch.where(same, middle, low), torch.where(same, high, middle)
        if len(others):
            nearest[i] = (high * (others - x[i]).flatten(1).norm(dim=1)).min()
    return nearest


def test_refinements_leave_the_equilibria_certified_and_no_radius():
    model = kq.models.build("geq-tiny", settings={"refinements": 1, "norm": 1.0}).eval()
    certificate = certify(model, torch.randn(2, 3, 8, 8))
    assert certificate.unique and float(certificate.error.max()) < 1e-5
    assert bool((certificate.radius == 0).all()) and bool(certificate.margin.isfinite().all())
    assert math.isinf(certificate.lipschitz.max()) and bool((certificate.lipschitz.diagonal() == 0).all())


@pytest.mark.parametrize("name", ["dense gaussian", "lipschitz"])
def test_nor_with_weights_that_are_chosen_to_break_it(name):
    """Weights climb the ratio of the change of a logit difference to what the certificate allows, and stay below 1."""
    model = sharpened(MODELS[name](1))
    x = pictures(model, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    offset = torch.zeros_like(x)
    ratios = []
    for _ in range(6):
        allowed = certify(model, x).lipschitz[0, 1]
        step = (x + offset + 0.1 * torch.randn_like(x)).requires_grad_()
        moved = model(step) - model(x)
        ratio = ((moved[:, 0] - moved[:, 1]).abs() / (step - x).flatten(1).norm(dim=1)).mean()
        ratios.append(float(ratio.detach() / allowed))
        optimizer.zero_grad()
        (g,) = torch.autograd.grad(ratio, step, retain_graph=True)
        (-ratio.log()).backward()
        optimizer.step()
        offset = (step.detach() - x) + 0.3 * g / g.norm().clamp_min(1e-30)
    assert max(ratios) <= 1


def test_the_radius_of_a_linear_model_is_the_distance_to_its_boundary():
    """With W = 0, orthogonal U and states that are positive all around, logits are affine in x."""
    model = dense(Linear(), 0.9)
    inject = model.equilibrium.cell.inject
    with torch.no_grad():
        model.equilibrium.cell.operator.weight.zero_()
        nn.init.orthogonal_(inject[0].weight)
        for norm in (inject[1], model.norm):
            norm.running_mean.zero_()
            norm.running_var.fill_(1 - norm.eps)
            norm.weight.fill_(1)
            norm.bias.fill_(0)
        inject[1].bias.fill_(50.0)
    # The 12 rows of U span a part of the 16 pixels; the nearest point of the boundary lies in it.
    x = pictures(model, 5)
    certificate = certify(model, x, std=[0.5])
    head, U = model.head.weight.detach(), inject[0].weight.detach()
    logits = model(x).detach()
    for row, predicted, radius, pixels in zip(
        logits, certificate.prediction, certificate.radius, certificate.pixel_radius, strict=True
    ):
        distances = [
            float((row[predicted] - row[other]) / ((head[predicted] - head[other]) @ U).norm())
            for other in range(3)
            if other != predicted
        ]
        assert float(radius) == pytest.approx(min(distances), rel=1e-6)
        assert float(pixels) == pytest.approx(0.5 * min(distances), rel=1e-6)


def test_pixel_radii_know_that_channels_were_divided_by_different_numbers():
    torch.manual_seed(0)
    model = kq.models.build("geq-certified-tiny", classes=3, channels=3, settings={"width": 16}).eval()
    x = torch.randn(4, 3, 8, 8)
    plain, some = certify(model, x, std=[0.25] * 3), certify(model, x, std=[0.2, 0.25, 0.4])
    torch.testing.assert_close(plain.pixel_radius, 0.25 * plain.radius)
    assert (some.pixel_radius >= 0.2 * plain.radius * (1 - 1e-6)).all()
    assert (some.pixel_radius <= 0.4 * plain.radius * (1 + 1e-6)).all()


@pytest.mark.parametrize("name", ["dense gaussian", "linear features", "lipschitz"])
def test_the_error_of_a_sloppy_solve_is_stated_and_taken_from_the_radius(name):
    model = MODELS[name](2)
    x = pictures(model, 4)
    sloppy, sharp = certify(model, x, tol=1e-2), certify(model, x, tol=1e-10)
    assert (sharp.error < 1e-4).all() and (sloppy.error > sharp.error).all()
    assert (sloppy.radius <= sharp.radius * (1 + 1e-9)).all() and (sloppy.radius < sharp.radius).any()


def test_a_layer_past_its_threshold_certifies_nothing_and_says_so():
    model = dense(Gaussian(0.5, split=4, hidden=6), 4.0)
    with torch.no_grad():
        model.equilibrium.cell.operator.weight.mul_(100)
    certificate = certify(model, pictures(model, 3))
    assert not certificate.unique and (certificate.radius == 0).all() and certificate.error.isinf().all()
    assert "Uniqueness not shown (dense: L = 16 ≥ 2.24)" in str(certificate)
    convex = MODELS["dense multiquadric"](0)
    with torch.no_grad():
        convex.equilibrium.cell.operator.weight.mul_(100)
    assert "One equilibrium (dense: L = 25, any L will do)" in str(certify(convex, pictures(convex, 3)))


def test_the_same_whatever_the_batch_and_without_touching_the_model():
    model = MODELS["lipschitz"](0)
    x = pictures(model, 5).float()
    model = model.float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole, parts = certify(model, x), certify(model, x, batch=2)
    torch.testing.assert_close(whole.radius, parts.radius)
    assert whole.radius.dtype == torch.float64 and next(model.parameters()).dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_has_no_certificate_is_refused_in_a_sentence():
    with pytest.raises(TypeError, match="`Classifier` and `DenseClassifier`.*got ResNet"):
        certify(kq.models.build("resnet-tiny"), torch.zeros(1, 3, 8, 8))
    with pytest.raises(TypeError, match="about equilibria, got a layer that gives 3 steps"):
        certify(
            kq.models.build("geq-tiny", settings={"gradient": {"name": "unrolled", "steps": 3}}),
            torch.zeros(1, 3, 8, 8),
        )
    with pytest.raises(TypeError, match="radial kernels and the linear one, got Sigmoid"):
        certify(kq.models.build("mopteq-sigmoid-tiny"), torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"at least one sample, got shape \(0, 3, 8, 8\)"):
        certify(kq.models.build("geq-certified-tiny"), torch.zeros(0, 3, 8, 8))
    with pytest.raises(ValueError, match="each of the 3 channels, got 1"):
        certify(kq.models.build("geq-tiny"), torch.zeros(1, 3, 8, 8), std=[1.0])
    with pytest.raises(ValueError, match="needs a radial kernel"):
        kq.models.build("opteq-tiny", settings={"lipschitz": True})
    assert math.isinf(Gaussian().input_lipschitz(1.5))
    with pytest.raises(ValueError, match="a `norm` at which the equilibrium is unique"):
        kq.models.build("geq-tiny", settings={"lipschitz": True, "norm": 1.5})


LAYERS = ("resolvent", "potential", "sdp", "almost-orthogonal")
CHAIN = {"width": 4, "depths": [1, 1]}


def sharpened_chain(model):
    for layer in model.layers():
        layer.tol, layer.max_steps = 1e-5, 1000
    return model


def chain(layer: str = "resolvent", *, seed: int = 0, stretch: float = 3.0, **more) -> kq.models.CertifiedClassifier:
    """A chain whose weights are far from those it starts with, and whose biases are not 0."""
    torch.manual_seed(seed)
    model = kq.models.build("certified-tiny", classes=3, channels=1, settings=CHAIN | {"layer": layer} | more)
    with torch.no_grad():
        for name, parameter in model.chain.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(std=0.3)
            elif "project" not in name:
                parameter.mul_(stretch).add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


CHAINS = {layer: {"layer": layer} for layer in LAYERS} | {
    "multiquadric": {"kernel": Multiquadric(0.3, split=4, patch=2, hidden=6)},
    "norm 8": {"norm": 8.0, "stretch": 100.0},
}


@pytest.mark.parametrize("name", CHAINS)
def test_no_attack_changes_a_prediction_of_a_chain_inside_its_radius(name):
    model = chain(**CHAINS[name])
    x = pictures(model, 3)
    certificate = certify(model, x, std=(0.4,))
    assert certificate.unique and (certificate.radius > 0).all() and certificate.error.max() < 1e-4
    assert certificate.pixel_radius is not None
    torch.testing.assert_close(certificate.pixel_radius, 0.4 * certificate.radius)
    sharpened_chain(model)
    assert torch.equal(model(x).argmax(1), certificate.prediction)
    assert (attack(model, x, certificate.prediction, certificate.radius, steps=4, restarts=1) < 0).all()
    if name == "resolvent":
        crossings = boundary(model, x, certificate.prediction)
        assert crossings.isfinite().any() and (certificate.radius <= crossings).all()


def test_nor_with_weights_of_a_chain_that_are_chosen_to_break_it():
    """Ascent on the weights of how much further apart two pictures' logits are than the constant allows."""
    model, x = sharpened_chain(chain()), torch.randn(2, 1, 8, 8, dtype=torch.float64)
    other = x + 0.1 * torch.randn_like(x)
    optimizer, worst = torch.optim.Adam(model.chain.parameters(), lr=0.1), 0.0
    for _ in range(6):
        apart = model(x) - model(other)
        lengths = torch.cdist(model.head.rescale_weight(), model.head.rescale_weight())[0, 1:]
        ratio = (apart[:, :1] - apart[:, 1:]).abs() / lengths / (x - other).flatten(1).norm(dim=1)[:, None]
        worst = max(worst, float(ratio.detach().max()))
        optimizer.zero_grad()
        (-ratio.sum()).backward()
        optimizer.step()
    assert 0.05 < worst <= 1


def test_what_an_unfinished_solve_of_a_chain_is_off_is_taken_from_the_radius():
    model = chain()
    x = pictures(model, 6)
    exact, radii = certify(model, x), []
    for tol in (1e-4, 1e-3, 1.0):
        sloppy = certify(model, x, tol=tol)
        radii.append(sloppy.radius)
        assert (sloppy.error >= exact.error).all() and (sloppy.radius <= exact.radius).all()
        moved = (sloppy.margin - exact.margin).abs()
        assert (moved <= 2 * 2 * sloppy.error * len(model.layers()) * model.head.gain).all()
    assert (radii[-1] < exact.radius).all() and (radii[0] > 0).any()


def test_an_error_of_a_layer_is_bounded_for_any_state_it_stops_at():
    layer, a = chain().layers()[0], torch.randn(5, 4, 8, 8, dtype=torch.float64)
    layer.solver, layer.tol, layer.max_steps = kq.solvers.Proximal(), 1e-11, 2000
    exact, least = chain_module.reflect(layer, a)
    assert (least < 1e-6).all()
    for steps in (1, 2, 4, 8, 16):
        layer.max_steps = steps
        value, error = chain_module.reflect(layer, a)
        distance = (value - exact).flatten(1).norm(dim=1)
        assert (distance <= error).all() and (error < 40 * distance).all()


def test_damaged_vectors_and_weights_cost_a_chain_its_radius_and_never_its_truth():
    model = chain()
    x = pictures(model, 4)
    for layer in model.layers():  # a wrong estimate of ‖W‖ scales W otherwise: another model, with its own radius
        layer.cell.cell.operator.tracker.vector.normal_()
        layer.cell.cell.operator.tracker.settled = None
    assert (certify(model, x).radius > 0).any()
    with torch.no_grad():
        model.layers()[-1].cell.cell.operator.weight[0] = torch.nan
    assert (certify(model, x).radius == 0).all()
    wrong = chain("potential")
    x = pictures(wrong, 4)
    before = certify(wrong, x)
    tracker = wrong.chain[0].operator.tracker
    vector = tracker.vector = torch.randn_like(tracker.vector)  # of another singular value, so that ‖W‖ is too small
    tracker.settled = Settled.at(vector, wrong.chain[0].operator.weight, 1.0)
    assert certify(wrong, x).lipschitz.max() > 1.05 * before.lipschitz.max()


def test_how_far_the_program_is_off_at_the_picture_itself_is_stated():
    model = chain(tol=1e-2).float()
    x = pictures(model.double(), 6)
    model.float()
    certificate = certify(model, x.float())
    logits = model(x.float()).double()
    exact = certify(model, x).margin
    lead = logits.gather(1, certificate.prediction[:, None]) - logits
    lead = lead.scatter(1, certificate.prediction[:, None], torch.inf).amin(1)
    assert ((lead - exact).abs() <= certificate.deviation).all() and (certificate.deviation < 1).all()


def test_a_chain_undoes_the_units_of_channels():
    model = chain(std=(0.25,))
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    certificate = certify(model, x, std=(0.25,))
    torch.testing.assert_close(certificate.pixel_radius, 0.25 * certificate.radius)
    torch.testing.assert_close(certificate.lipschitz, 0.25 * torch.cdist(*[model.head.rescale_weight()] * 2))

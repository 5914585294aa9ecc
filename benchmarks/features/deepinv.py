"""What deepinv does, by its equilibrium of proximal gradient steps: `PGD(DEQ=…)` with a network of one's own."""

from functools import partial
from typing import Any

import deepinv
import torch
from torch import Tensor, nn

from .judge import (
    Cell,
    count_kept,
    find_absent,
    find_error,
    find_gradient_error,
    judge_autocast,
    judge_compiled,
    judge_ddp,
    judge_forward_mode,
    judge_gradient,
    judge_loudness,
    judge_masks,
    judge_second,
    judge_transforms,
    judge_works,
    no,
    partly,
    unroll,
    yes,
)

PACKAGE = "deepinv"
STEP = 0.5


class Denoiser(nn.Module):
    """A small residual network; the second argument, a noise level, is deepinv's."""

    def __init__(self, drop: float = 0.0, norm: nn.Module | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.drop, self.norm = nn.Conv2d(1, 1, 3, padding=1), nn.Dropout(drop), norm or nn.Identity()
        self.rows = 0

    def forward(self, z: Tensor, sigma: object = None) -> Tensor:
        self.rows += len(z)
        return torch.tanh(self.norm(self.drop(self.conv(z))))


class Model(nn.Module):
    """z = D(z − (z − y) / 2), solved by deepinv."""

    def __init__(self, denoiser: Denoiser | None = None, backward: dict[str, Any] | None = None, **settings: Any):
        super().__init__()
        self.denoiser = denoiser or Denoiser()
        prior, fidelity = deepinv.optim.prior.PnP(self.denoiser), deepinv.optim.data_fidelity.L2()
        rule = deepinv.optim.DEQConfig(**({"max_iter_backward": 200} | (backward or {})))
        limits = {"max_iter": 300, "thres_conv": 1e-12, "early_stop": True}
        parts = {"prior": prior, "data_fidelity": fidelity, "stepsize": STEP, "sigma_denoiser": 0.1, "DEQ": rule}
        self.solver = deepinv.optim.PGD(**(parts | limits | settings)).to(torch.get_default_dtype())
        self.physics = deepinv.physics.Denoising(deepinv.physics.GaussianNoise(0.1))

    def forward(self, y: Tensor, **more: Any) -> Any:
        return self.solver(y, self.physics, **more)


def make_pictures(samples: int = 3) -> Tensor:
    numbers = torch.randn(samples, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    return numbers * torch.logspace(-1, 0.3, samples)[:, None, None, None]


def check_error(**backward: Any) -> float:
    model, y = Model(backward=backward), make_pictures()
    truth = unroll(lambda z: model.denoiser(z - STEP * (z - y)), torch.zeros_like(y))
    return find_gradient_error(model(y), truth, model.denoiser.conv.weight)


def several_tensors() -> Cell:
    y = make_pictures()
    return judge_works(lambda: Model()((y, y)), "a pair of pictures")


def several_dtypes() -> Cell:
    return no("one picture is the state")


def dicts() -> Cell:
    return judge_works(lambda: Model()({"u": make_pictures()}), "a dict")


def any_module() -> Cell:
    model = Model()
    model(make_pictures())
    return partly("as the denoiser of a step on a data term, of `PGD`, `HQS` or `GD`, not as f")


def named_inputs() -> Cell:
    error = find_error(lambda: Model()(make_pictures(), scale=0.5))
    return no(f"a denoiser gets z and its noise level: {error}")


def start() -> Cell:
    model, y = Model(early_stop=True, thres_conv=1e-6), make_pictures()
    value = model(y).detach()
    model.denoiser.rows = 0
    model(y)
    cold, model.denoiser.rows = model.denoiser.rows, 0
    model(y, init=value)
    return yes(f"by `init=`: {cold // len(y)} evaluations from the default, {model.denoiser.rows // len(y)} from there")


def limits() -> Cell:
    return no(f"max_iter=(5, 50): {find_error(lambda: Model(max_iter=(5, 50))(make_pictures()))}")


def drawn_steps() -> Cell:
    return no(f"max_iter=range(3, 6): {find_error(lambda: Model(max_iter=range(3, 6))(make_pictures()))}")


def status() -> Cell:
    _, metrics = Model(thres_conv=1e-6)(make_pictures(), compute_metrics=True)
    return partly(f"`metrics` has {len(metrics['residual'])} residuals of samples, none says whether it converged")


def steps() -> Cell:
    _, metrics = Model(thres_conv=1e-6)(make_pictures(), compute_metrics=True)
    return no(f"as many for all: {sorted({len(each) for each in metrics['residual']})}")


def leaving() -> Cell:
    model, y = Model(thres_conv=1e-6), make_pictures(16)
    _, metrics = model(y, compute_metrics=True)
    taken = len(metrics["residual"][0])
    return no(f"{model.denoiser.rows} rows were evaluated in {taken} steps of 16 samples, and for the gradient")


def apart() -> Cell:
    y, model = make_pictures(8), Model(thres_conv=1e-4)
    far = float((model(y)[:1] - model(y[:1])).abs().max())
    return (yes if far == 0 else no)(f"a sample's answer moves by {far:.0e} with its neighbours")


def residuals() -> Cell:
    _, metrics = Model(thres_conv=1e-6)(make_pictures(), compute_metrics=True)
    return yes(f"`metrics`: {len(metrics['residual'])} samples, {len(metrics['residual'][0])} steps")


def states() -> Cell:
    return find_absent("deepinv.optim", "save iterates", "return iterates")


def jacobian() -> Cell:
    y = make_pictures()
    denoiser = Denoiser()
    norm = deepinv.loss.JacobianSpectralNorm(max_iter=20, tol=1e-6)
    z = y.clone().requires_grad_()
    found = norm(denoiser(z), z)
    torch.autograd.grad(found, denoiser.conv.weight)
    return partly(f"its spectral norm, `JacobianSpectralNorm`, with a graph; {found.numel()} number for the batch")


def radius() -> Cell:
    return find_absent("deepinv.optim", "spectral radius")


def masks() -> Cell:
    return find_absent(PACKAGE, "variational dropout")


def any_dropout() -> Cell:
    denoiser = Denoiser(drop=0.5)
    return judge_masks(denoiser.drop, lambda: Model(denoiser, max_iter=20)(make_pictures() + 1))


def norms() -> Cell:
    denoiser, calls = Denoiser(), []
    nn.utils.parametrizations.weight_norm(denoiser.conv)
    denoiser.conv.parametrizations.weight[0].register_forward_hook(lambda *_: calls.append(1))  # type: ignore[index, union-attr]
    Model(denoiser, thres_conv=1e-4)(make_pictures())
    return no(f"PyTorch's parametrization is computed {len(calls)} times in a solve")


def implicit() -> Cell:
    return judge_gradient(check_error())


def phantom() -> Cell:
    return find_absent("deepinv.optim", "phantom grad")


def neumann() -> Cell:
    free, cut = check_error(jacobian_free=True), check_error(max_iter_backward=3)
    kept = {count_kept(partial(Model(backward={"max_iter_backward": k}), make_pictures())) for k in (3, 30)}
    assert len(kept) == 1
    return partly(f"Jacobian-free, off by {free:.0e}; a backward solve cut at 3 steps is off by {cut:.0e}")


def shine() -> Cell:
    return find_absent("deepinv.optim", "shine")


def reversible() -> Cell:
    return find_absent("deepinv.optim", "reversible")


def in_eval() -> Cell:
    return judge_works(lambda: Model().eval()(make_pictures()).sum().backward(), "the value has its gradient")


def second() -> Cell:
    model = Model()
    return judge_second(lambda x: model(x.view(1, 1, 2, 3)).view(1, 6))


def transforms() -> Cell:
    model = Model()
    return judge_transforms(lambda x: model(x.view(-1, 1, 2, 3)).view(-1, 6))


def forward_mode() -> Cell:
    model = Model()
    return judge_forward_mode(lambda x: model(x.view(-1, 1, 2, 3)).view(-1, 6))


def backward_record() -> Cell:
    return find_absent("deepinv.optim", "backward metrics", "backward residual", "backward stat")


def batch_norm() -> Cell:
    denoiser = Denoiser(norm=nn.BatchNorm2d(1))
    denoiser.norm.weight.data.fill_(0.3)  # type: ignore[operator]
    model, y = Model(denoiser, thres_conv=1e-3), make_pictures(16)
    value, metrics = model(y, compute_metrics=True)
    with torch.no_grad():
        image = model.denoiser(value - STEP * (value - y))
        true = (image - value).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)
    said = torch.tensor([each[-1] for each in metrics["residual"]]) <= 1e-3
    wrong = int((said & (true > 2e-3)).sum())
    return (no if wrong else yes)(f"of {int(said.sum())} with a residual under 1e-3, {wrong} are not")


def randomness() -> Cell:
    return judge_loudness(lambda: Model(Denoiser(drop=0.3), max_iter=50)(make_pictures()))


def forward_failure() -> Cell:
    return judge_loudness(lambda: Model(max_iter=2)(make_pictures()))


def backward_failure() -> Cell:
    return judge_loudness(lambda: Model(backward={"max_iter_backward": 2})(make_pictures()).sum().backward())


def settings() -> Cell:
    return judge_loudness(lambda: Model(max_iters=3))


def bounds() -> Cell:
    return find_absent("deepinv.optim", "error bound", "certified", "certify")


def compiled() -> Cell:
    model = Model(max_iter=5, early_stop=False)
    error = find_error(lambda: torch.compile(model, fullgraph=True, backend="aot_eager")(make_pictures()))
    return no(f"fullgraph: {error}") if error else judge_compiled(lambda: model)


def autocast() -> Cell:
    def make() -> nn.Module:
        torch.set_default_dtype(torch.float32)
        try:
            return Pictures()
        finally:
            torch.set_default_dtype(torch.float64)

    return judge_autocast(make)


class Pictures(nn.Module):
    """The same model of rows of six numbers, as pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(thres_conv=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.model(x.view(-1, 1, 2, 3)).view(-1, 6)
        return value


def ddp() -> Cell:
    return judge_ddp(TightPictures)


class TightPictures(nn.Module):
    """The same, solved tightly."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.model(x.view(-1, 1, 2, 3)).view(-1, 6)
        return value


def checkpointing() -> Cell:
    class Checkpointed(Denoiser):
        def forward(self, z: Tensor, sigma: object = None) -> Tensor:
            found: Tensor = torch.utils.checkpoint.checkpoint(super().forward, z, use_reentrant=False)
            return found

    model, y = Model(Checkpointed()), make_pictures()
    truth = unroll(lambda z: model.denoiser(z - STEP * (z - y)), torch.zeros_like(y))
    error = find_error(lambda: find_gradient_error(model(y), truth, model.denoiser.conv.weight))
    return no(error) if error else judge_gradient(find_gradient_error(model(y), truth, model.denoiser.conv.weight))

"""Deep declarative networks whose node is a kernel GLM: kGLM's problems (6) and (9), and their gradients.

(6)  min over γ  Σₛ L(Ỹₛ, F_γ(fₛ*))  subject to  αₛ* = argmin J(α; Xₛ, Yₛ),  fₛ* = k(X̃ₛ, Xₛ)αₛ* + m
(9)  the same, subject to  zₛ* = σ(W₁ₛzₛ* + W₂ₛTₛ + W₃ₛρ(zₛ*) + m),  fₛ* = V₁ₛ(zₛ* + ρ(zₛ*)) + V₂ₛTₛ + m

J is `Problem.objective`, fₛ* is `DeclarativeNode`'s output, and F_γ any network, γ its parameters: the objective of
both is loss(head(node(X, Y, X2)), Y2). W₁ₛ = W₃ₛ = −W₂ₛ = −k(Xₛ, Xₛ)/λ and V₂ₛ = −V₁ₛ = k(X̃ₛ, Xₛ)/λ (Corollary 5).
The two constraints are one: the equilibrium is where the dual of J is largest (`dual`), for every semi-definite K and
every λ > 0. Shared coordinates make W and V shared too (Corollary 6); to train those, as parameters of the
`KernelEquilibrium` that `DeclarativeNode.layer` gives, is problem (3).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn

from ..gradients.base import once
from .equilibrium import KernelEquilibrium
from .exact import Gram
from .families import FLAT, AbstractFamily, Prior
from .glm import KernelGLM
from .kernels import coordinates
from .newton import Problem, newton

Constraint = Literal["minimum", "equilibrium"]  # of (6), of (9)
ONCE = 'The minimum is differentiated once only: use `constraint="equilibrium"` for second derivatives.'


def minimise(problem: Problem) -> Tensor:
    """Return α* = argmin J, (batch, n), by Newton's method, with gradients to K, T and the offset m.

    A declarative node has Dα* = −H⁻¹B, H = ∂²J/∂α², B = ∂²J/∂α∂θ (Gould et al., 2021). As ∂J/∂α = −Kr and r = 0 at α*,
    H = K(λI + DK) and B = −K ∂r/∂θ: K cancels, and Dα* = (λI + DK)⁻¹ ∂r/∂θ, which needs no inverse of K. It is the
    derivative of one more Newton step at α*, whose matrix is a constant: so there is no second one.
    """
    assert isinstance(problem.basis, Gram)
    fixed = Gram(problem.basis.K.detach())
    with torch.no_grad():
        fit = newton(dataclasses.replace(problem, basis=fixed)).warn_if_unsolved()
    residual = problem.residual(fit.coefficients, problem.canonical(fit.coefficients))
    alpha = fit.coefficients + fixed.solve(problem.curvature(fit.eta), problem.lam, residual)
    if alpha.requires_grad:  # the hook holds the residual, not alpha, which would hold itself
        alpha.register_hook(lambda g: once(g, g, residual, ONCE) if torch.is_grad_enabled() else g)  # type: ignore[no-untyped-call]
    return alpha


def dual(problem: Problem, eta: Tensor) -> Tensor:
    """Return the dual of J at z = g(η), g = A′ + Q′, per sample: −1ᵀ(A + Q)*(z) − (T − z)ᵀK(T − z)/2λ − mᵀ(T − z).

    J(α) ≥ dual(η) for all α and η, with equality at the solution only. Its gradient in z is (K/λ)(T − z) + m − η: z*
    maximises it exactly if it is the equilibrium. So a solve knows its error, ½λ‖α − α*‖²_K ≤ J(α) − dual(η).
    """
    z = problem.family.mean(eta) + problem.prior.slope(eta)
    gap = problem.t - z
    rest = eta * z - problem.prior.penalty(eta) + gap * (problem.basis.lift(gap) / (2 * problem.lam) + problem.offset)
    return problem.family.log_partition(eta).sum(-1) - rest.flatten(1).sum(-1)


def _find_modules(part: Any) -> list[nn.Module]:
    """Return the modules in a kernel or an offset, such as the k₀ and the s of `Scaled(k₀, s)`."""
    if isinstance(part, nn.Module):
        return [part]
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    return [module for field in fields for module in _find_modules(getattr(part, field.name))]


@final
class DeclarativeNode(nn.Module):
    """(X, Y, X2) ↦ f*(X2; X, Y), (batch, m): the kernel GLM of every data set, as a layer that can be differentiated.

    The arguments are those of `KernelGLM`. Kernel and offset may be modules: their parameters learn with the rest of
    the network (f* depends on K and λ through K/λ alone, so a kernel with a trainable variance learns λ too). Targets
    Y are (batch, n); coordinates X and X2 are shared, (n, d) and (m, d), or each data set's own, (batch, n, d) and
    (batch, m, d). Gradients reach Y, X and X2 as well. The `constraint` is that of (6), solved by Newton's method with
    the declarative gradient, or that of (9), an equilibrium with weights made from the coordinates and the implicit
    gradient: the same function.
    """

    def __init__(
        self,
        kernel: Any,
        family: AbstractFamily,
        *,
        lam: float,
        prior: Prior = FLAT,
        offset: Callable[[Tensor], Tensor] | None = None,
        constraint: Constraint = "minimum",
    ) -> None:
        super().__init__()
        if constraint not in get_args(Constraint):
            raise ValueError(f"`constraint` must be one of {', '.join(get_args(Constraint))}, got {constraint!r}.")
        self.glm = KernelGLM(kernel, family, lam=lam, prior=prior, offset=offset)
        self.trained = nn.ModuleList([*_find_modules(kernel), *_find_modules(offset)])
        self.constraint = constraint

    def forward(self, X: Tensor, Y: Tensor, X2: Tensor) -> Tensor:
        """Return f*, the canonical prediction at X2."""
        X, X2 = (points if points.ndim == 3 else coordinates(points) for points in (X, X2))
        batches = X.ndim == 3
        if X.ndim != X2.ndim or X.shape[-1] != X2.shape[-1] or (batches and not len(X) == len(X2) == len(Y)):
            raise ValueError(
                f"X and X2 are both (n, d), or both (batch, n, d) with one entry for each of the {len(Y)} data sets; "
                f"got {tuple(X.shape)} and {tuple(X2.shape)}."
            )
        if self.constraint == "minimum":
            alpha = minimise(self.glm.pose(X, Y))
            across = self.glm.covariance(X2, X)
            if alpha.ndim == 3:
                return across @ alpha + self.glm.offset_at(X2)
            return (across @ alpha[..., None])[..., 0] + self.glm.offset_at(X2)
        if X.ndim == 2:
            return self._equilibrium(X, Y, X2)
        return torch.cat([self._equilibrium(x, y[None], x2) for x, y, x2 in zip(X, Y, X2, strict=True)])

    def layer(self, X: Tensor, X2: Tensor) -> KernelEquilibrium:
        """Return the equilibrium model for shared coordinates with its weights set free: from here (3) starts."""
        X = coordinates(X)
        return self.glm.layer(X, coordinates(X2, like=X))

    def _equilibrium(self, X: Tensor, Y: Tensor, X2: Tensor) -> Tensor:
        """Return f* by the equilibrium whose weights are functions of the coordinates, not parameters."""
        layer = self.glm.layer(X.detach(), X2.detach())
        W, V = self.glm.kernel(X, X) / self.glm.lam, self.glm.kernel(X2, X) / self.glm.lam
        weights = {f"layer.cell.{name}": weight for name, weight in (("W1", -W), ("W2", W), ("W3", -W))}
        weights |= {"layer.cell.bias": self.glm.offset_at(X), "V1": -V, "V2": V, "bias": self.glm.offset_at(X2)}
        present = {name: weights[name] for name, _ in layer.named_parameters()}
        canonical: Tensor = torch.func.functional_call(layer, present, (Y.to(X.dtype),))
        return canonical

"""What the tests of kernel GLMs share: every family with its priors, and data for each."""

import torch

from kerneq import kglm
from kerneq.kglm.families import FLAT

FAMILIES = [
    kglm.Gaussian(0.5),
    kglm.Bernoulli(),
    kglm.Binomial(5),
    kglm.Poisson(),
    kglm.Ising(),
    kglm.Ising(2.0),
    kglm.Rectified(),
    kglm.LeakyReLU(0.1),
    kglm.LeakyReLU(0.0),
]
# every family with the flat prior factor, and each other factor with a bounded and an unbounded mean
CASES = [
    *((family, FLAT) for family in FAMILIES),
    (kglm.Bernoulli(), kglm.Normal(0.5)),
    (kglm.Poisson(), kglm.Normal(0.5)),
    (kglm.LeakyReLU(0.1), kglm.Normal(0.5)),
    (kglm.Ising(2.0), kglm.Logistic()),
    (kglm.Rectified(), kglm.Logistic()),
]


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets(family, *shape, seed=5):
    """Random values in the family's support."""
    u = uniform(*shape, seed=seed)
    if isinstance(family, kglm.Binomial):
        return (u * (family.trials + 1)).floor()
    if isinstance(family, kglm.Poisson):
        return (8 * u).floor()
    if isinstance(family, kglm.Ising):
        return torch.where(u < 0.4, -1.0, 1.0).double()
    return 3 * u

"""Kernel GLMs, their equilibrium form, and equilibrium layers initialised as kernel GLMs."""

from kerneq.kglm.activation import LeakyReLU as LeakyReLU
from kerneq.kglm.adapter import as_kernel as as_kernel
from kerneq.kglm.families import Bernoulli as Bernoulli
from kerneq.kglm.families import Binomial as Binomial
from kerneq.kglm.families import Gaussian as Gaussian
from kerneq.kglm.families import Ising as Ising
from kerneq.kglm.families import Poisson as Poisson
from kerneq.kglm.families import Rectified as Rectified
from kerneq.kglm.family import AbstractFamily as AbstractFamily
from kerneq.kglm.family import Custom as Custom
from kerneq.kglm.glm import KernelGLM as KernelGLM

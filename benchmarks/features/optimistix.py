"""What optimistix does; its arrays are JAX's."""

import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # two devices for "two processes"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optimistix as optx

from .judge import (
    Cell,
    find_absent,
    find_error,
    judge_gradient,
    judge_loudness,
    judge_works,
    make_inputs,
    no,
    partly,
    yes,
)

PACKAGE = "optimistix"
jax.config.update("jax_enable_x64", True)
TIGHT = optx.FixedPointIteration(rtol=1e-12, atol=1e-12)
LOOSE = optx.FixedPointIteration(rtol=1e-3, atol=1e-3)
Array = Any


def make_problem() -> tuple[Array, Array]:
    """Return weights and inputs."""
    return jax.random.normal(jax.random.PRNGKey(0), (6, 6)) / 6**0.5, jnp.asarray(make_inputs().numpy())


def block(z: Array, weights: tuple[Array, Array]) -> Array:
    W, x = weights
    return jnp.tanh(0.5 * z @ W + x)


def solve(f: Any, z0: Any, given: Any = None, **settings: Any) -> Any:
    return optx.fixed_point(f, settings.pop("solver", TIGHT), z0, given, **settings)


def value(W: Array, x: Array, **settings: Any) -> Array:
    return solve(block, jnp.zeros_like(x), (W, x), **settings).value


def unroll(W: Array, x: Array, steps: int = 400) -> Array:
    return jax.lax.fori_loop(0, steps, lambda _, z: block(z, (W, x)), jnp.zeros_like(x))


def check_error(**settings: Any) -> float:
    W, x = make_problem()
    got = jax.grad(lambda W: (value(W, x, **settings) ** 2).sum())(W)
    want = jax.jacfwd(lambda W: (unroll(W, x) ** 2).sum())(W)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def several_tensors() -> Cell:
    z0 = (jnp.zeros((5, 6)), jnp.zeros((5, 2)))
    return judge_works(lambda: solve(lambda z, _: (0.5 * z[0] + 1, 0.5 * z[1] + 1), z0), "any pytree of arrays")


def several_dtypes() -> Cell:
    z0 = (jnp.zeros((5, 6)), jnp.zeros((5, 2), dtype=jnp.float32))
    found = solve(lambda z, _: (0.5 * z[0] + 1, 0.5 * z[1] + 1), z0, solver=LOOSE).value
    return yes(f"{found[0].dtype} and {found[1].dtype} stay")


def dicts() -> Cell:
    return judge_works(lambda: solve(lambda z, _: {"u": 0.5 * z["u"] + 1}, {"u": jnp.zeros(3)}), "any pytree")


def any_module() -> Cell:
    value(*make_problem())
    return partly("any function f(y, args); a layer is for the user to write")


def named_inputs() -> Cell:
    W, x = make_problem()
    error = find_error(lambda: optx.fixed_point(block, TIGHT, jnp.zeros_like(x), (W, x), scale=0.5))
    return partly(f"one argument `args`, any pytree; by keyword: {error}")


def start() -> Cell:
    W, x = make_problem()
    cold = solve(block, jnp.zeros_like(x), (W, x))
    warm = solve(block, cold.value, (W, x))
    return yes(f"{int(cold.stats['num_steps'])} steps from 0, {int(warm.stats['num_steps'])} from the solution")


def limits() -> Cell:
    error = find_error(lambda: solve(lambda z, _: jnp.cos(z), jnp.zeros(3), max_steps=(5, 50)))
    return no(f"no modes; max_steps=(5, 50): {error}")


def drawn_steps() -> Cell:
    return judge_works(lambda: solve(lambda z, _: jnp.cos(z), jnp.zeros(3), max_steps=range(3, 6)), "a range")


def _map_samples() -> Any:
    """Solve for each sample apart, by vmap."""
    rates = jnp.linspace(0.1, 0.9, 16)
    return jax.vmap(lambda r: solve(lambda z, r: r * z + 1, jnp.zeros(2), r, throw=False, max_steps=100))(rates)


def status() -> Cell:
    found = _map_samples()
    good = int((found.result == optx.RESULTS.successful).sum())
    return yes(f"by `jax.vmap`: {good} of 16 successful")


def steps() -> Cell:
    taken = _map_samples().stats["num_steps"]
    return yes(f"by `jax.vmap`: from {int(taken.min())} to {int(taken.max())}")


def leaving() -> Cell:
    rows = []

    def count(z: Array) -> Array:
        rows.append(int(np.prod(z.shape[:-1])))
        return np.asarray(z)

    def f(z: Array, r: Array) -> Array:
        z = jax.pure_callback(count, jax.ShapeDtypeStruct(z.shape, z.dtype), z, vmap_method="expand_dims")
        return r * z + 1

    run = jax.vmap(lambda r: solve(f, jnp.zeros(2), r, throw=False, max_steps=100))
    taken = int(run(jnp.linspace(0.1, 0.9, 16)).stats["num_steps"].max())
    return no(f"under `jax.vmap` {sum(rows)} rows were evaluated in {taken} steps of 16 samples")


def apart() -> Cell:
    rates = jnp.linspace(0.2, 0.9, 8)
    one = jax.vmap(lambda r: solve(lambda z, r: r * z + 1, jnp.zeros(2), r, solver=LOOSE, throw=False).value)
    far = float(jnp.abs(one(rates)[:1] - one(rates[:1])).max())
    return (yes if far == 0 else no)(f"by `jax.vmap` a sample's answer moves by {far:.0e} with its neighbours")


def residuals() -> Cell:
    found = solve(block, jnp.zeros((5, 6)), make_problem())
    return no(f"`stats` has {', '.join(sorted(found.stats))}")


def states() -> Cell:
    return find_absent(PACKAGE, "saveat", "return iterates", "intermediate states")


def jacobian() -> Cell:
    return find_absent(PACKAGE, "hutchinson", "jacobian norm", "jac reg")


def radius() -> Cell:
    return find_absent(PACKAGE, "spectral radius", "power iteration", "arnoldi")


def masks() -> Cell:
    _, x = make_problem()

    def f(z: Array, given: tuple[Array, Array]) -> Array:
        return jnp.tanh(0.5 * z * jax.random.bernoulli(given[0], 0.5, z.shape) + given[1])

    run = lambda: solve(f, jnp.zeros_like(x), (jax.random.PRNGKey(3), x))  # noqa: E731
    return judge_works(run, "the key is an argument, so every evaluation draws the same")


def any_dropout() -> Cell:
    import equinox

    _, x = make_problem()
    drop = equinox.nn.Dropout(0.5)
    f = lambda z, given: jnp.tanh(0.2 * drop(z, key=given[0]) + given[1])  # noqa: E731
    return judge_works(
        lambda: solve(f, jnp.zeros_like(x), (jax.random.PRNGKey(3), x)), "`equinox.nn.Dropout` by its key"
    )


def norms() -> Cell:
    W, x = make_problem()
    jax.grad(lambda W: value(W / jnp.linalg.norm(W, 2), x).sum())(W)
    return yes("what is computed before the call and handed over in `args` is computed once, and differentiated")


def implicit() -> Cell:
    return judge_gradient(check_error())


def phantom() -> Cell:
    return find_absent(PACKAGE, "phantom")


def neumann() -> Cell:
    return find_absent(PACKAGE, "neumann", "truncated", "jacobian free")


def shine() -> Cell:
    return find_absent(PACKAGE, "shine")


def reversible() -> Cell:
    error = check_error(adjoint=optx.RecursiveCheckpointAdjoint())
    return partly(f"`RecursiveCheckpointAdjoint` keeps log n states and computes anew; off by {error:.0e}")


def in_eval() -> Cell:
    return yes("JAX has no modes")


def second() -> Cell:
    W, x = make_problem()
    x, h = x[:1], 1e-5
    slope = jax.grad(lambda x: (value(W, x) ** 2).sum())
    got = jax.jacrev(slope)(x)[0, :, 0]
    d = jnp.eye(6)
    want = jnp.stack([(slope(x + h * e) - slope(x - h * e))[0] / (2 * h) for e in d], 1)
    far = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    return (yes if far < 1e-5 else no)(f"off by {far:.0e} from a difference of gradients")


def transforms() -> Cell:
    W, x = make_problem()

    def run() -> None:
        jax.vmap(lambda x: value(W, x[None])[0])(x)
        jax.jacrev(lambda x: value(W, x))(x)
        jax.grad(lambda x: value(W, x).sum())(x)

    return judge_works(run, "`jax.vmap`, `jacrev` and `grad` go through")


def forward_mode() -> Cell:
    W, x = make_problem()
    d, h = jnp.ones_like(x), 1e-5
    got = jax.jvp(lambda x: value(W, x), (x,), (d,))[1]
    want = (value(W, x + h * d) - value(W, x - h * d)) / (2 * h)
    far = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    return (yes if far < 1e-5 else no)(f"off by {far:.0e} from a difference")


def backward_record() -> Cell:
    return find_absent(PACKAGE, "backward stats", "adjoint stats")


def batch_norm() -> Cell:
    W, x = make_problem()
    x = jnp.concatenate([x * s for s in jnp.logspace(-2, 0, 12)])

    def f(z: Array, given: tuple[Array, Array]) -> Array:
        y = z @ given[0]
        return jnp.tanh(0.3 * (y - y.mean(0)) / (y.std(0) + 1e-3) + given[1])

    found = solve(f, jnp.zeros_like(x), (W, x), solver=LOOSE, throw=False, max_steps=300)
    image = f(found.value, (W, x))
    true = jnp.linalg.norm(image - found.value, axis=1) / jnp.linalg.norm(image, axis=1)
    good = bool(found.result == optx.RESULTS.successful)
    wrong = int((true > 1e-2).sum()) if good else 0
    return (no if wrong else yes)(f"of {len(x)} called converged, {wrong} are not; the whole array is one state")


def randomness() -> Cell:
    return yes("a function without its key as an argument draws once, when it is traced")


def forward_failure() -> Cell:
    cell = judge_loudness(lambda: solve(lambda z, _: 3 * z + 1, jnp.ones(3), max_steps=20))
    return yes("raises, unless `throw=False`") if cell.answer == "yes" else cell


def backward_failure() -> Cell:
    W, x = make_problem()
    few = optx.ImplicitAdjoint(lineax.GMRES(rtol=1e-12, atol=1e-12, max_steps=1, restart=1))
    cell = judge_loudness(lambda: jax.grad(lambda W: value(4 * W, 0.1 * x, adjoint=few, throw=False).sum())(W))
    return yes("raises, with GMRES cut at one step") if cell.answer == "yes" else cell


def settings() -> Cell:
    return judge_loudness(lambda: solve(lambda z, _: 0.5 * z, jnp.ones(3), max_step=3))


def bounds() -> Cell:
    return find_absent(PACKAGE, "error bound", "certif")


def compiled() -> Cell:
    W, x = make_problem()
    step = jax.jit(jax.grad(lambda W: (value(W, x) ** 2).sum()))
    return judge_works(lambda: step(W), "`jax.jit` of a training step, adaptive solves too")


def autocast() -> Cell:
    W, x = (t.astype(jnp.bfloat16) for t in make_problem())
    loose = optx.FixedPointIteration(rtol=3e-2, atol=3e-2)
    error = find_error(lambda: jax.grad(lambda W: value(W, x, solver=loose).astype(jnp.float32).sum())(W))
    return no(error) if error else partly("arrays of bfloat16, gradients too; JAX has no autocast")


def ddp() -> Cell:
    W, _ = make_problem()
    x = jnp.asarray(make_inputs(8).numpy())
    step = jax.jit(jax.grad(lambda W, x: (value(W, x) ** 2).mean()))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",))
    shared = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch")))
    far = float(jnp.abs(step(W, shared) - step(W, x)).max())
    assert len(jax.devices()) > 1
    return (yes if far < 1e-9 else no)(f"the batch on two devices, gradients {far:.0e} from those of one")


def checkpointing() -> Cell:
    W, x = make_problem()
    f = jax.checkpoint(block)
    run = lambda: jax.grad(lambda W: solve(f, jnp.zeros_like(x), (W, x)).value.sum())(W)  # noqa: E731
    return judge_works(run, "`jax.checkpoint` of f")

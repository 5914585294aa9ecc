"""Models of users as equilibria: states of any structure, inputs of any kind, starts, traces, wrong answers."""

import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import kerneq as kq
from kerneq.gradients import Implicit, Neumann, Phantom, Point, Reversible, Unrolled
from kerneq.solvers import Anderson, Broyden, Newton, Picard, Proximal

pytestmark = pytest.mark.usefixtures("float64")
TIGHT = Implicit(tol=1e-12, max_steps=300)


@dataclasses.dataclass
class Flow:
    height: Tensor
    speed: Tensor


class Cell(nn.Module):
    """Two states that drive each other; one input by sample, one number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, z, x, scale=1.0):
        u, v = z
        return torch.tanh(0.5 * self.down(v) + x) * scale, torch.tanh(0.5 * self.up(u))

    def start(self, x, scale=1.0):
        return x.new_zeros(len(x), 4), x.new_zeros(len(x), 6)


class Block(nn.Module):
    def __init__(self, size=8, norm=None, drop=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.norm, self.drop = nn.Linear(size, size), norm or nn.Identity(), nn.Dropout(drop)

    def forward(self, z, x):
        return torch.tanh(0.6 * self.drop(self.norm(self.linear(z))) + x)


def spread(samples=32, size=8):
    """Inputs that take different numbers of steps."""
    torch.manual_seed(2)
    return torch.randn(samples, size) * torch.logspace(-2, 0.5, samples)[:, None]


def residual(f, z, *inputs):
    return (f(z, *inputs) - z).norm(dim=1) / f(z, *inputs).norm(dim=1)


# structures


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), Newton()], ids=lambda s: type(s).__name__)
def test_a_state_of_two_tensors_is_the_state_of_them_in_one(solver):
    cell, x = Cell(), spread(5, 4)
    s = kq.fixed_point(cell, cell.start(x), x, solver=solver, tol=1e-11, max_steps=200, gradient=TIGHT)
    assert isinstance(s.value, tuple) and s.converged.all() and s.residual.shape == (5,)

    def joined(z):
        return torch.cat(cell((z[:, :4], z[:, 4:]), x), 1)

    whole = kq.fixed_point(joined, torch.zeros(5, 10), solver=solver, tol=1e-11, max_steps=200, gradient=TIGHT)
    torch.testing.assert_close(torch.cat(s.value, 1), whole.value, rtol=1e-9, atol=1e-10)
    got = torch.autograd.grad(s.value[1].square().sum(), list(cell.parameters()))
    want = torch.autograd.grad(whole.value[:, 4:].square().sum(), list(cell.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", [list, lambda pair: dict(zip("uv", pair, strict=True)), lambda pair: Flow(*pair)])
def test_the_value_has_the_structure_of_the_start(kind):
    z0 = kind((torch.zeros(3, 2), torch.zeros(3, 1, 5, dtype=torch.float32)))

    def f(z):
        u, v = vars(z).values() if isinstance(z, Flow) else z.values() if isinstance(z, dict) else z
        return kind((0.5 * u + 1, 0.5 * v + 2))

    for s in (kq.solve(f, z0, Picard(), tol=1e-6), kq.fixed_point(f, z0, tol=1e-6)):
        assert type(s.value) is type(z0)
        leaves = (
            list(vars(s.value).values())
            if isinstance(z0, Flow)
            else list(s.value.values() if isinstance(z0, dict) else s.value)
        )
        assert leaves[1].dtype == torch.float32
        torch.testing.assert_close(leaves[0], torch.full((3, 2), 2.0), rtol=1e-4, atol=0)
    found = kq.attach(lambda z, c: tuple(c * t for t in z), (torch.zeros(3, 2), torch.zeros(3, 1)), torch.rand(3, 1))
    assert isinstance(found, tuple) and found[0].shape == (3, 2)


def test_a_state_without_a_batch_is_one_sample():
    A = torch.randn(6, 6)
    A = 0.5 * A / torch.linalg.matrix_norm(A, 2)
    s = kq.fixed_point(lambda z: A @ z + 1, torch.zeros(6), tol=1e-10, batched=False)
    assert s.converged.shape == (1,) and s.value.shape == (6,)
    torch.testing.assert_close(s.value, torch.linalg.solve(torch.eye(6) - A, torch.ones(6)), rtol=1e-8, atol=1e-8)


def test_the_residual_is_joint_or_that_of_the_worst_tensor():
    def f(z):
        return 0.5 * z[0] + 1e4, 0.9 * z[1] + 1e-3

    joint, leaf = (
        kq.solve(f, (torch.zeros(2, 3),) * 2, Picard(), tol=1e-3, max_steps=200, norm=n) for n in ("joint", "leaf")
    )
    assert joint.converged.all() and leaf.converged.all()
    assert (joint.value[1] - 1e-2).abs().max() > 1e-3 > 1e-4 > (leaf.value[1] - 1e-2).abs().max()
    with pytest.raises(ValueError, match="`norm` must be 'joint' or 'leaf'"):
        kq.solve(f, torch.zeros(2, 3), Picard(), norm="max")


# layers


def test_any_module_is_a_layer_whose_state_is_like_its_input():
    block, x = Block(), spread()
    layer = kq.Equilibrium(block, tol=1e-10, max_steps=100)
    s = layer(x)
    assert isinstance(layer.solver, Anderson) and s.converged.all() and residual(block, s.value, x).max() < 1e-9
    assert set(dict(layer.named_parameters())) == {"cell.f.linear.weight", "cell.f.linear.bias"}
    s.value.sum().backward()
    assert block.linear.weight.grad is not None and [b.converged.all().item() for b in s.backward] == [True]
    assert isinstance(kq.Equilibrium(torch.cos).solver, Anderson)
    assert isinstance(
        kq.Equilibrium(kq.cells.DenseCell(kq.kernels.Gaussian(), inputs=2, state=3, features=2)).solver, Proximal
    )


def test_inputs_are_positional_or_named_tensors_or_not():
    cell, x = Cell(), spread(5, 4)
    layer = kq.Equilibrium(cell, init=cell.start, tol=1e-10)
    one, other = layer(x, 0.5).value, layer(x=x, scale=0.5).value
    torch.testing.assert_close(one[0], other[0])
    assert layer(x).value[0].norm() > one[0].norm()
    with pytest.raises(TypeError, match="scales"):
        layer(x, scales=0.5)


def test_a_start_saves_steps_and_a_state_of_another_shape_is_said():
    block, x = Block(), spread()
    layer = kq.Equilibrium(block, solver=Picard(), tol=1e-8, max_steps=200)
    s = layer(x).detach()
    assert not s.value.requires_grad and s.backward is None
    again = layer(x, z0=s.value)
    assert (again.steps <= 2).all() and s.steps.max() > 5
    cell = kq.cells.DenseCell(kq.kernels.Gaussian(), inputs=8, state=6, features=4)
    kernel = kq.Equilibrium(cell.eval(), tol=1e-8)
    assert kernel(x, z0=kernel(x).value.detach()).steps.max() < kernel(x).steps.max()
    with pytest.raises(ValueError, match="must have the shape of the state"):
        kernel(x, z0=x)
    with pytest.raises(RuntimeError) as caught:
        kq.Equilibrium(lambda z, x: x @ torch.ones(8, 3) + z @ torch.ones(3, 3))(x)
    assert "give `init=` or `z0=`" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError) as caught:
        kq.Equilibrium(lambda z, x: x @ torch.ones(8, 3) + z, init=torch.zeros_like)(x)
    assert not getattr(caught.value, "__notes__", [])  # the start was given
    with pytest.raises(kq.EquilibriumError) as failed:
        kq.Equilibrium(block, max_steps=1, on_failure="raise")(x)
    assert not getattr(failed.value, "__notes__", [])  # the start is not why
    with pytest.raises(ValueError, match="does not know where to start"):
        kq.Equilibrium(lambda z: z.cos())()
    assert kq.Equilibrium(lambda z: z.cos())(z0=torch.zeros(2, 3)).converged.all()


def test_limits_differ_in_training_and_evaluation_and_steps_may_be_drawn():
    block, x = Block(), spread()
    layer = kq.Equilibrium(block, tol=(1e-2, 1e-9), max_steps=(range(3, 7), 90), on_failure="return")
    torch.manual_seed(0)
    drawn = {int(layer(x).steps.max()) for _ in range(40)}
    assert drawn <= {3, 4, 5, 6} and len(drawn) > 1
    assert layer.eval()(x).residual.max() <= 1e-9
    for bad in (range(0), range(0, 3), (3, 0), -1):
        with pytest.raises(ValueError, match="`max_steps` must be a whole number"):
            kq.Equilibrium(block, max_steps=bad)


def test_solving_changes_every_layer_called_inside_or_those_of_a_model():
    model = nn.Sequential(kq.Equilibrium(Block(), on_failure="return"), kq.Value())
    layer, x = model[0], spread()
    with kq.solving(max_steps=1), kq.solving(solver=Picard(), tol=1e-9):
        assert layer(x).steps.max() == 1
        assert kq.Equilibrium(Block(), on_failure="return")(x).tol == 1e-9
    with kq.solving(max_steps=1, on_failure="raise"), pytest.raises(kq.EquilibriumError):
        layer(x)
    with kq.solving(model, max_steps=2):
        assert layer(x).steps.max() == 2
        assert kq.Equilibrium(Block())(x).steps.max() > 2
    assert layer.solver == Anderson() and layer.max_steps == 50 and layer(x).converged.all()
    with pytest.raises(ValueError, match="max_steps"), kq.solving(max_steps=0):
        layer(x)


# traces


def test_a_trace_has_each_step_and_states_with_gradients():
    block, x = Block(), spread(6)
    layer = kq.Equilibrium(block, solver=Picard(), tol=1e-6)
    s, plain = layer(x, trace=(1, 4)), layer(x)
    torch.testing.assert_close(s.value, plain.value)
    assert s.trace.residual.shape == (int(s.steps.max()), 6) and s.trace.energy is None
    z = torch.zeros_like(x)
    for step in range(1, 5):
        torch.testing.assert_close(s.trace.residual[step - 1], residual(block, z, x).detach())
        if step in (1, 4):
            torch.testing.assert_close(s.trace.states[step], z)
            assert s.trace.states[step].requires_grad
        z = block(z, x).detach()
    cell = kq.cells.DenseCell(kq.kernels.Gaussian(), inputs=8, state=6, features=4)
    t = kq.solve(cell.eval().bind(x), None, Proximal(memory=0), tol=1e-9, trace=True).trace
    assert (t.energy.diff(dim=0) <= 1e-12).all()  # the averaged step descends
    fixed = kq.solve(torch.cos, torch.zeros(2, 3), Picard(), max_steps=7, check_every=7, trace=(7,)).trace
    assert fixed.residual.shape == (7, 2) and fixed.states[7].shape == (2, 3)


# stabilisers


def test_parametrised_weights_are_computed_once_a_solve_with_their_gradient():
    block, x = Block(), spread()
    plain = kq.Equilibrium(block, tol=1e-10, gradient=TIGHT)(x).value
    weight = torch.autograd.grad(plain.square().sum(), block.linear.weight)[0]
    parametrizations.weight_norm(block.linear)
    calls = []
    block.linear.parametrizations.weight[0].register_forward_hook(lambda *_: calls.append(1))
    normed = kq.Equilibrium(block, tol=1e-10, gradient=TIGHT)(x).value
    g, v = block.linear.parametrizations.weight.original0, block.linear.parametrizations.weight.original1
    found = torch.autograd.grad(normed.square().sum(), (g, v))
    assert len(calls) == 1
    with torch.enable_grad():
        want = torch.autograd.grad((torch._weight_norm(v, g, 0) * weight).sum(), (g, v))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_random_function_is_named_and_fixed_randomness_converges():
    block, x = Block(drop=0.3), spread()
    with pytest.warns(RuntimeWarning, match="f draws random numbers.*FixedRandomness"):
        kq.Equilibrium(block, on_failure="return")(x)
    torch.manual_seed(3)
    layer = kq.Equilibrium(kq.FixedRandomness(block), tol=1e-9)
    one, other = layer(x), layer(x)
    assert one.converged.all() and not torch.equal(one.value, other.value)
    assert layer.eval()(x).converged.all()


# truth


@pytest.mark.parametrize("solver", [Picard(), Anderson()], ids=lambda s: type(s).__name__)
def test_samples_that_meet_in_f_are_solved_as_one_and_converge_in_truth(solver):
    block, x = Block(norm=nn.BatchNorm1d(8)), spread(64)
    block.linear.weight.data *= 0.3
    for s in (pytest.warns(RuntimeWarning, match="samples meet in it.*`batched=False`"),):
        with s:
            found = kq.fixed_point(block, torch.zeros_like(x), x, solver=solver, max_steps=300, on_failure="return")
    true = residual(block, found.value, x)
    assert found.converged.all() == (true <= 1.5e-3).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kq.fixed_point(block, torch.zeros_like(x), x, solver=solver, batched=False, on_failure="return")


def test_samples_that_an_input_ties_together_are_solved_as_one():
    torch.manual_seed(4)
    A, x, linear = torch.rand(8, 8) / 10, spread(8, 5), nn.Linear(5, 5)

    def f(z, A, x):
        return torch.tanh(A @ linear(z) + x)

    with pytest.warns(RuntimeWarning, match="samples meet in it"):
        s = kq.fixed_point(f, torch.zeros(8, 5), A, x, tol=1e-9, max_steps=100)
    assert s.converged.all() and residual(f, s.value, A, x).max() < 1e-8
    quiet = kq.fixed_point(f, torch.zeros(8, 5), A, x, tol=1e-9, max_steps=100, batched=False)
    torch.testing.assert_close(s.value, quiet.value, rtol=1e-6, atol=1e-8)


def test_a_function_that_keeps_samples_apart_is_solved_apart():
    block, x = Block(), spread()
    sizes = []
    kq.fixed_point(lambda z, x: sizes.append(len(z)) or block(z, x), torch.zeros_like(x), x, solver=Picard(), tol=1e-9)
    assert min(sizes) < 32 == sizes[0]


def test_a_buffer_of_its_own_and_numbers_too_small_are_not_taken_for_a_fixed_point():
    buffer = torch.zeros(2, 3)
    for f in (lambda z: buffer.copy_(torch.cos(z)), lambda z: buffer.copy_(torch.cos(z)).detach(), lambda z: z.cos_()):
        with pytest.raises(ValueError, match="must not change z in place, nor return memory"):
            kq.solve(f, torch.zeros(2, 3), Picard())
    assert kq.solve(lambda z: z, torch.ones(2, 3), Picard()).converged.all()
    assert kq.fixed_point(lambda z, x: z, torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)).converged.all()
    s = kq.solve(lambda z: 0.5 * z + 1e-30, torch.zeros(2, 3, dtype=torch.float32), Picard())
    assert s.status is kq.Status.PRECISION and not s.converged.any()
    assert kq.solve(lambda z: 0 * z, torch.zeros(2, 3), Picard()).converged.all()


def test_a_buffer_of_its_own_is_refused_where_the_second_evaluation_is_the_last():
    """From so near a start the next evaluation is expected to end the solve, and keeps its graph."""
    buffer, x = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="must not change z in place, nor return memory"):
        kq.fixed_point(lambda z, x: buffer.detach().copy_(0.9 * z + 0.1 * x), 0.85 * x, x, tol=1e-3)


@pytest.mark.parametrize("gradient", [Phantom(), Implicit()])
def test_under_autocast_no_cast_of_the_solve_outlives_it(gradient, monkeypatch):
    """PyTorch 2.6 would keep casts made without a graph, and the weights would get no gradient."""
    seen, block, x = [], Block(), spread().float()
    clear = torch.clear_autocast_cache
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: seen.append("clear") or clear())
    with torch.autocast("cpu", torch.bfloat16):
        kq.fixed_point(
            lambda z, x: seen.append(torch.is_grad_enabled()) or block.float()(z, x),
            torch.zeros_like(x),
            x,
            solver=Picard(),
            gradient=gradient,
            tol=2e-2,
            on_failure="return",
        )
    assert False in seen and seen[seen.index(True) - 1] == "clear"


def test_a_failed_solve_of_a_function_warns_and_names_a_remedy_that_exists():
    def f(z):
        return 3 * z + 1

    with pytest.warns(RuntimeWarning, match="The fixed-point solve failed.*spectral_radius"):
        kq.fixed_point(f, torch.ones(2, 3), solver=Picard(), max_steps=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody reads the residual of these
        kq.fixed_point(f, torch.ones(2, 3), solver=Picard(), max_steps=5, check_every=5)
        kq.fixed_point(f, torch.ones(2, 3), gradient=Unrolled(3))
    s = kq.fixed_point(
        lambda z, x: 0.9 * z + x,
        torch.zeros(2, 3),
        torch.ones(2, 3, requires_grad=True),
        gradient=Implicit(max_steps=2),
    )
    with pytest.warns(RuntimeWarning, match=r"The backward solve failed.*`Implicit\(max_steps=…\)`"):
        s.value.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_tolerances_are_within_reach_of_the_dtype(dtype):
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).float()
    x = torch.randn(8, 6, 32, dtype=torch.float32)
    layer = kq.Equilibrium(lambda z, x: 0.5 * attention(z + x))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        s = layer(x)
    assert s.converged.all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s.value.float().square().sum().backward()
    assert s.backward[0].converged.all()


def test_the_value_of_a_phantom_gradient_is_the_point_that_the_status_speaks_of():
    torch.manual_seed(0)
    cell = kq.cells.DenseCell(kq.kernels.Multiquadric(0.01), inputs=8, state=32, features=16, norm=3.0)
    with torch.no_grad():
        for p in cell.parameters():
            p.mul_(10)
    layer, x = kq.Equilibrium(cell.eval(), gradient=Phantom(), max_steps=500), torch.randn(6, 8)
    s = layer(x)
    f = cell.bind(x)
    z = kq.solve(f, None, Proximal(), tol=1e-13, max_steps=3000).value
    assert s.converged.all() and ((s.value - z).norm(dim=1) <= s.error_bound * (1 + 1e-9)).all()
    with torch.no_grad():
        assert torch.equal(layer(x).value, s.value)


# derivatives of derivatives


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by PyTorch's own forward mode
@pytest.mark.parametrize("structured", [False, True])
def test_fixed_points_are_differentiable_twice_and_by_torch_func_with_respect_to_their_inputs(structured):
    block, x = Block(3), torch.randn(2, 3)

    def value(x):
        if structured:
            s = kq.fixed_point(
                lambda z, x: {"z": block(z["z"], x)},
                {"z": torch.zeros_like(x)},
                x,
                tol=1e-13,
                max_steps=200,
                gradient=TIGHT,
            )
            return s.value["z"]
        return kq.fixed_point(block, torch.zeros_like(x), x, tol=1e-13, max_steps=200, gradient=TIGHT).value

    x.requires_grad_()
    assert torch.autograd.gradcheck(value, x) and (structured or torch.autograd.gradgradcheck(value, x, atol=1e-4))
    want = torch.autograd.functional.jacobian(value, x)
    x = x.detach()
    block.requires_grad_(False) if structured else None
    torch.testing.assert_close(torch.func.jacrev(value)(x), want, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(torch.func.jacfwd(value)(x), want, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(torch.func.vmap(lambda x: value(x[None])[0])(x), value(x), rtol=1e-7, atol=1e-8)


def test_what_a_transform_cannot_give_is_refused():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="leaves no `trace`"):
        torch.func.grad(lambda x: kq.fixed_point(torch.mul, x, 0.5 * x, trace=True).value.sum())(x)
    cell = kq.cells.DenseCell(kq.kernels.Linear(), inputs=3, state=3, features=2)
    with pytest.raises(ValueError, match="takes no `z0`"):
        torch.func.grad(lambda x: kq.Equilibrium(cell.eval())(x, z0=x).value.sum())(x)


def test_what_a_transform_follows_must_be_an_input():
    a = torch.ones(3)
    with pytest.raises(RuntimeError, match="must be an input behind `z0`"):
        torch.func.grad(lambda a: kq.fixed_point(lambda z: 0.5 * z.cos() + a, torch.zeros(2, 3)).value.sum())(a)
    with pytest.raises(RuntimeError, match="must be an input behind `z0`"):
        torch.func.vmap(lambda a: kq.fixed_point(lambda z: 0.5 * z.cos() + a, torch.zeros(2, 3)).value)(
            torch.ones(4, 3)
        )


@pytest.mark.parametrize("rule", [Phantom(3), Neumann(3), Unrolled(6), Reversible(6)], ids=str)
def test_every_rule_takes_structures(rule):
    cell, x = Cell(), spread(5, 4)
    s = kq.fixed_point(cell, cell.start(x), x, gradient=rule)
    s.value[0].sum().backward()
    assert cell.up.weight.grad.isfinite().all()
    assert Implicit().attach(lambda z: 0.5 * z, Point(torch.zeros(2, 3))).z.shape == (2, 3)


# several processes


def test_gradients_are_the_same_by_ddp_by_fsdp_and_with_checkpointing(tmp_path):
    program = Path(__file__).parent / "sharded_step.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program, tmp_path], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        for name in ("checkpointed", "ddp", "fsdp"):
            torch.testing.assert_close(found[name], found["one"], rtol=1e-9, atol=1e-11)

"""What the columns share: a network, the gradient it should have, and what a run is judged by."""

import dataclasses
import datetime
import importlib.util
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor, nn

Answer = Literal["yes", "partly", "no", "not run"]


@final
@dataclasses.dataclass(frozen=True)
class Cell:
    """Whether a library does it, and what was found when it was tried."""

    answer: Answer
    found: str


def yes(found: str) -> Cell:
    return Cell("yes", found)


def partly(found: str) -> Cell:
    return Cell("partly", found)


def no(found: str) -> Cell:
    return Cell("no", found)


CARD = Cell("not run", "needs a CUDA card")


@final
class Block(nn.Module):
    """tanh(Wz / 2 + x) times `scale`, with dropout on Wz; W starts the same in every one."""

    def __init__(self, size: int = 6, drop: float = 0.0, norm: nn.Module | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.drop, self.norm = nn.Linear(size, size), nn.Dropout(drop), norm or nn.Identity()

    def forward(self, z: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * torch.tanh(0.5 * self.norm(self.drop(self.linear(z))) + x)


def make_inputs(samples: int = 5, size: int = 6) -> Tensor:
    """Inputs (samples, size) whose solves take different numbers of steps."""
    numbers = torch.randn(samples, size, generator=torch.Generator().manual_seed(1))
    return numbers * torch.logspace(-1, 0.3, samples)[:, None]


def unroll(f: Callable[[Tensor], Tensor], z: Tensor, steps: int = 400) -> Tensor:
    """Take plain steps, all in the graph: their end and gradients are the truth here."""
    for _ in range(steps):
        z = f(z)
    return z


def find_gradient_error(value: Tensor, truth: Tensor, parameter: Tensor) -> float:
    """Return how far the gradient of ‖value‖² is from that of ‖truth‖², relative."""
    got, want = (torch.autograd.grad(t.square().sum(), parameter, retain_graph=True)[0] for t in (value, truth))
    return float((got - want).norm() / want.norm())


def judge_gradient(error: float, within: float = 1e-6) -> Cell:
    """Judge a gradient by its distance from that of 400 unrolled steps."""
    said = f"off by {error:.0e} from 400 unrolled steps"
    return yes(said) if error <= within else no(said)


def judge_approximation(few: float, many: float) -> Cell:
    """Judge a truncated rule: its error must fall with its terms."""
    said = f"off by {few:.0e}, with more terms by {many:.0e}"
    return yes(said) if many < 0.5 * few < 1 else no(said)


def judge_reuse(error: float, free: float) -> Cell:
    """Judge a gradient that reuses what the forward solve has learnt: it must be better than knowing nothing."""
    said = f"off by {error:.2f}, without what was learnt by {free:.2f}"
    return yes(said) if error < free else no(said)


def count_kept(call: Callable[[], object]) -> int:
    """Return how many numbers the graphs made in this call keep."""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: _note(sizes, t), lambda t: t):
        call()
    return sum(sizes)


def _note(sizes: list[int], t: Tensor) -> Tensor:
    sizes.append(t.numel())
    return t


def find_warning(call: Callable[[], object]) -> str:
    """Return the first words of what a call raises or warns of; nothing if it is silent."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {shorten(error)}"
    said = [w for w in caught if issubclass(w.category, RuntimeWarning | UserWarning) and "jit" not in str(w.message)]
    return f"warns: {shorten(said[0].message)}" if said else ""


def judge_loudness(call: Callable[[], object]) -> Cell:
    """Judge a call that must not pass in silence."""
    said = find_warning(call)
    return yes(said) if said else no("silent")


def shorten(said: object, length: int = 70) -> str:
    """Return the first line of a message, at most so long."""
    line = (str(said).strip() or "no message").splitlines()[0].replace("|", "/").replace("`", "")
    return line if len(line) <= length else line[:length].rsplit(" ", 1)[0] + " …"


def find_error(call: Callable[[], object]) -> str:
    """Return how a call fails, in short; nothing if it works. Warnings count as nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {shorten(error)}"
    return ""


def judge_works(call: Callable[[], object], found: str) -> Cell:
    """Judge a call by whether it works: `found` says what was done."""
    error = find_error(call)
    return no(error) if error else yes(found)


def read_sources(package: str) -> Iterator[str]:
    """Yield the text of every file of an installed package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    for path in Path(spec.origin).parent.rglob("*.py"):
        yield path.read_text(encoding="utf-8", errors="replace")


def find_absent(package: str, *words: str) -> Cell:
    """Judge by the sources that nothing of these names is there: that cannot be called."""
    pattern = "|".join(words).replace(" ", "[ _-]?")
    if any(re.search(pattern, text, re.IGNORECASE) for text in read_sources(package)):
        raise AssertionError(f"{package} does mention {pattern}: try it")
    return no(f"its files mention no {', no '.join(words)}")


def turn(z: Tensor) -> Tensor:
    """Apply a matrix whose eigenvalues are a complex pair of modulus 0.9; it is not normal."""
    return z @ torch.tensor([[0.0, 0.6], [-1.35, 0.0]])


def judge_radius(real: Tensor, pair: Tensor, unit: str) -> Cell:
    """Judge the spectral radius found of a diagonal matrix, 0.7, and of `turn`, 0.9."""
    said = f"{unit}: 0.7 as {float(real.mean()):.2f}, a complex pair of 0.9 as {float(pair.mean()):.2f}"
    return (yes if bool((pair - 0.9).abs().max() < 1e-3) else partly)(said)


class Counting:
    """z ↦ rate · z + 1 with a rate for each sample, counting the rows it is given."""

    def __init__(self, samples: int = 16):
        self.rates, self.rows = torch.linspace(0.1, 0.9, samples)[:, None], 0

    def __call__(self, z: Tensor, rates: Tensor | None = None) -> Tensor:
        self.rows += len(z)
        return (self.rates if rates is None else rates) * z + 1


def judge_rows(rows: int, steps: int, samples: int = 16) -> Cell:
    """Judge whether samples that have converged are computed no more."""
    share = rows / (steps * samples)
    said = f"{rows} rows were evaluated in {steps} steps of {samples} samples"
    return yes(said) if share < 0.8 else no(said)


def judge_masks(module: nn.Module, solve: Callable[[], object]) -> Cell:
    """Judge whether a module drops the same entries at every evaluation of a solve."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda m, i, out: seen.append((out == 0).detach()))
    error = find_error(solve)
    handle.remove()
    if error or len(seen) < 3:
        return no(error or f"{len(seen)} evaluations only")
    alike = all(torch.equal(seen[0], other) for other in seen[1:])
    return (yes if alike else no)(f"{'the same' if alike else 'another'} mask in {len(seen)} evaluations")


def count_normed(solve: Callable[[Block], object]) -> int:
    """Return how often a weight normalised by `torch.nn.utils.parametrizations` is computed in a solve."""
    block, calls = Block(), []
    nn.utils.parametrizations.weight_norm(block.linear)
    block.linear.parametrizations.weight[0].register_forward_hook(lambda *_: calls.append(1))  # type: ignore[index, union-attr]
    solve(block)
    return len(calls)


def find_ddp_error(make: Callable[[], nn.Module]) -> float:
    """Return how far gradients by DistributedDataParallel on two processes are from those of one, relative."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_rank, (make, folder), nprocs=2)  # type: ignore[no-untyped-call, attr-defined]
        found = torch.load(Path(folder) / "gradient.pt")
    model = make()
    model(make_inputs(8)).square().mean().backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return float((found - want).norm() / want.norm())


def _run_rank(rank: int, make: Callable[[], nn.Module], folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined]
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    model = nn.parallel.DistributedDataParallel(make(), find_unused_parameters=True)
    model(make_inputs(8)[rank::2]).square().mean().backward()
    if rank == 0:
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        torch.save(torch.cat(grads), Path(folder) / "gradient.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def judge_ddp(make: Callable[[], nn.Module]) -> Cell:
    """Judge data-parallel training on two processes."""
    errors: list[float] = []
    failed = find_error(lambda: errors.append(find_ddp_error(make)))
    if failed:
        return no(failed)
    error = errors[0]
    return (yes if error < 1e-6 else no)(f"gradients of two processes are {error:.0e} from those of one")


def judge_compiled(make: Callable[[], nn.Module]) -> Cell:
    """Judge a training step of a model as one compiled graph."""
    model, x = make(), make_inputs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    error = find_error(lambda: compiled(x).square().sum().backward())
    if error:
        return no(f"fullgraph: {error}")
    got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).square().sum().backward()
    far = max(
        float((a - p.grad).abs().max()) for a, p in zip(got, model.parameters(), strict=False) if p.grad is not None
    )
    return (yes if far < 1e-9 else no)(f"a training step in one graph, {far:.0e} from the same uncompiled")


def judge_autocast(make: Callable[[], nn.Module]) -> Cell:
    """Judge a training step under bfloat16 autocast, in float32."""
    model, x = make().float(), make_inputs().float()

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            value = model(x)
        value.float().square().sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads and all(g.isfinite().all() for g in grads), "gradients that are no numbers"

    return judge_works(run, "a training step has finite gradients")


def judge_transforms(value: Callable[[Tensor], Tensor]) -> Cell:
    """Judge `torch.func`: a map over samples, and a Jacobian."""
    x = make_inputs(3)
    failed = {
        "vmap": find_error(lambda: torch.func.vmap(lambda x: value(x[None])[0])(x)),
        "jacrev": find_error(lambda: torch.func.jacrev(value)(x)),
        "grad": find_error(lambda: torch.func.grad(lambda x: value(x).sum())(x)),
    }
    good, bad = [n for n, e in failed.items() if not e], [(n, e) for n, e in failed.items() if e]
    if not bad:
        return yes("vmap, jacrev and grad go through")
    said = f"{bad[0][0]}: {bad[0][1]}"
    return partly(f"{', '.join(good)} go through; {said}") if good else no(said)


def judge_forward_mode(value: Callable[[Tensor], Tensor]) -> Cell:
    """Judge forward mode against a difference."""
    x, d, h = make_inputs(3), torch.ones(3, 6), 1e-5
    error = find_error(lambda: torch.func.jvp(value, (x,), (d,)))
    if error:
        return no(error)
    got, want = torch.func.jvp(value, (x,), (d,))[1], (value(x + h * d) - value(x - h * d)).detach() / (2 * h)
    far = float((got - want).norm() / want.norm())
    return (yes if far < 1e-5 else no)(f"off by {far:.0e} from a difference")


def judge_second(value: Callable[[Tensor], Tensor]) -> Cell:
    """Judge second derivatives against differences."""
    x = make_inputs(1).requires_grad_()
    error = find_error(lambda: torch.autograd.gradgradcheck(value, x, atol=1e-4))
    return no(error) if error else yes("`gradgradcheck` holds")


def judge_batch_norm(solve: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor, str]]) -> Cell:
    """Judge an f with batch norm: the samples that are called converged must be, in the whole batch.

    `solve` gives the value, which samples it calls converged, and what was said.
    """
    block, x = Block(norm=nn.BatchNorm1d(6)), make_inputs(64) * torch.logspace(-1, 0.2, 64)[:, None]
    with torch.no_grad():
        block.linear.weight.mul_(0.5)
    value, converged, said = solve(block, x)
    with torch.no_grad():
        image = block(value, x)
        true = (image - value).norm(dim=1) / image.norm(dim=1)
    wrong = int((converged & (true > 2e-3)).sum())
    found = f"of {int(converged.sum())} called converged to 1e-3, {wrong} are not{said}"
    return no(found) if wrong else yes(found)

"""The fused Gaussian patch step on a CUDA card: is it right, and how near the memory's limit does it run?

python benchmarks/patch_step.py [--check-only] [--sweep] [--batch 512]

Times are medians of CUDA-graph replays, each over enough input sets to outgrow the cache four times. The
floor is what must be moved (forward 3N numbers; with backward 8N, 7N if `negated`) at the speed of a copy
measured in the same run. Exits with 1 if a result is further from float64 than its dtype allows.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kerneq.kernels import fused_reference as reference
from kerneq.kernels.fused import patch_step

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
TILINGS = list(itertools.product((16, 32, 64, 128), (4, 8), (1, 2, 3, 4, 6, 8, 16)))
DEVICE = "cuda"


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int]
    split: int = 8
    patch: int = 2
    dtype: torch.dtype = torch.bfloat16
    last: bool = True  # channels-last memory
    with_v: bool = True
    negated: bool = False

    def inputs(self) -> tuple[Any, ...]:
        """Fresh a, v, Q, γ and a cotangent u; γ puts the weights' exponents near 1."""
        n = self.split * self.patch**2
        form = torch.channels_last if self.last else torch.contiguous_format
        random = partial(torch.randn, device=DEVICE)
        a, v, u = (random(self.shape).to(self.dtype, memory_format=form) for _ in range(3))
        Q, gamma = torch.cov(random(n, 2 * n)), torch.tensor(1.0 / n, device=DEVICE)
        a, v, Q = (x.requires_grad_() for x in (a, v, Q))
        return a, v if self.with_v else None, Q, gamma, u

    def sets(self) -> list[tuple[Any, ...]]:
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        size = 3 * torch.Size(self.shape).numel() * self.dtype.itemsize
        return [self.inputs() for _ in range(min(64, max(2, -(-4 * cache // size))))]

    def fused(self, *inputs: Any) -> Tensor:
        return patch_step(*inputs, split=self.split, patch=self.patch, negated=self.negated)

    def plain(self, *inputs: Any) -> Tensor:
        return reference.forward(*inputs, self.split, self.patch, self.negated)[0]

    def __str__(self) -> str:
        marks = " nchw" * (not self.last) + " no-v" * (not self.with_v) + " negated" * self.negated
        return f"{'x'.join(map(str, self.shape))} split {self.split} p {self.patch} {self.dtype}{marks}"


FORMS = [(True, True, False), (True, True, True), (True, False, False), (False, True, False)]
ODD = [((3, 12, 12, 20), 4, 4), ((5, 24, 6, 6), 8, 2), ((7, 32, 3, 5), 16, 1), ((3, 16, 12, 12), 8, 4)]
CHECKED = [Case((4, 80, 16, 16), 8, 2, dtype, *form) for dtype in TOLERANCE for form in FORMS]
CHECKED += [Case(*sizes, dtype) for dtype in TOLERANCE for sizes in ODD]


def timed_cases(batch: int) -> list[Case]:
    geq = [Case((batch, c, s, s)) for c, s in ((64, 32), (128, 16), (128, 8), (256, 4))]
    kerdeq = Case((batch, 64, 32, 32), 4, 4)
    variants = [dataclasses.replace(geq[0], negated=True), dataclasses.replace(geq[0], with_v=False)]
    return [*geq, kerdeq, *variants, *(dataclasses.replace(c, dtype=torch.float32) for c in (geq[0], kerdeq))]


def errors(case: Case, step: Callable[..., Any]) -> dict[str, float]:
    """‖got − exact‖ / ‖exact‖ of each output and gradient, on fresh inputs and poisoned memory."""
    *inputs, u = case.inputs()
    t = 0.5 + torch.rand(case.shape[0], device=DEVICE)
    settings = {"split": case.split, "patch": case.patch, "similarity": True, "negated": case.negated}

    def run(step: Callable[..., Any], inputs: list[Tensor | None]) -> list[Tensor]:
        given = [None if x is None else x.detach().requires_grad_() for x in inputs]
        m, S = step(*given, **settings)
        leaves = [x for x in given if x is not None]
        grads = torch.autograd.grad((m, S), leaves, (u.to(m.dtype), t.to(S.dtype)))
        return [x.detach().double() for x in (m, S, *grads)]

    exact = run(patch_step, [None if x is None else x.double() for x in inputs])
    for _ in range(3):  # a compiled step warms up, is captured, and is replayed
        poison = [torch.full_like(u, torch.nan) for _ in range(3)]
        del poison  # its blocks, full of NaN, are what the outputs will be allocated from
        got = run(step, inputs)
    names = ["m", "S", "da", *["dv"] * case.with_v, "dQ", "dgamma"]
    return {k: float((x - y).norm() / y.norm()) for k, x, y in zip(names, got, exact, strict=True)}


def seconds(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """Median device time of one call, from replays of a CUDA graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in [*calls[:1] * 3, *calls]:
            call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[3:])


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    x, y = torch.randn(2, 2**29, device=DEVICE)
    return 2 * x.nbytes / seconds([lambda: y.copy_(x)])


def row(case: Case, bandwidth: float) -> dict[str, Any]:
    def both(f: Callable[..., Tensor], *d: Any) -> object:
        return torch.autograd.grad(f(*d[:4]), [x for x in d[:3] if x is not None], d[4])

    torch.compiler.reset()  # or the ninth shape would run uncompiled
    data = case.sets()
    numbers = (2, 5) if not case.with_v else (3, 7 if case.negated else 8)
    floors = [1e6 * k * data[0][0].nbytes / bandwidth for k in numbers]
    table: dict[str, Any] = {"case": str(case), "forward floor": floors[0], "both floor": floors[1]}
    compiled = torch.compile(case.plain, dynamic=False)
    for name, f in (("fused", case.fused), ("compiled", compiled), ("eager", case.plain)):
        with torch.no_grad():
            table[f"forward {name}"] = 1e6 * seconds([partial(f, *d[:4]) for d in data])
        table[f"both {name}"] = 1e6 * seconds([partial(both, f, *d) for d in data])
    return table


def sweep(case: Case) -> None:
    """Other tilings, forward and backward kernels alone (the sum of the parts of ∂Q included)."""
    import triton

    from kerneq.kernels import fused_launch as launch

    data = [[None if x is None else x.detach() for x in d] for d in case.sets()]
    settings, wanted = (case.split, case.patch, case.negated), [True, case.with_v, True, False]
    for tiling in itertools.starmap(launch.Tiling, TILINGS):
        forward = [partial(launch.forward, *d[:4], *settings, False, tiling) for d in data]
        backward = [partial(launch.backward, d[4], None, *d[:4], *settings, wanted, tiling) for d in data]
        try:
            found = f"forward {1e6 * seconds(forward, 10):.1f}, backward {1e6 * seconds(backward, 10):.1f} us"
        except triton.runtime.errors.OutOfResources as error:  # a tile too large for the card: a finding
            found = str(error)
        print(f"{case} {tiling}: {found}", flush=True)


def check() -> bool:
    right, compiled = [], torch.compile(patch_step, fullgraph=True, mode="reduce-overhead")
    plan = [(case, patch_step) for case in [*CHECKED, *timed_cases(8)]]
    for case, step in [*plan, (CHECKED[0], compiled), (CHECKED[5], compiled)]:
        found = errors(case, step)
        text = " ".join(f"{name} {e:.1e}" for name, e in found.items())
        right.append(all(e < TOLERANCE[case.dtype] for e in found.values()))  # NaN is not smaller
        print("ok   " if right[-1] else "WRONG", case, "compiled" * (step is compiled), text, flush=True)
    return all(right)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the fused patch step on a CUDA card.")
    parser.add_argument("--batch", type=int, default=512, help="pictures in a batch")
    parser.add_argument("--check-only", action="store_true", help="do not time")
    parser.add_argument("--sweep", action="store_true", help="also time other tilings of the kernels")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA card, and torch sees none here.")
    right = check()
    if options.check_only or not right:
        return 0 if right else 1
    cases, bandwidth = timed_cases(options.batch), copy_bandwidth()
    for case in (cases[0], cases[3], cases[4]) if options.sweep else ():
        sweep(case)
    rows = [row(case, bandwidth) for case in cases]
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e9:.0f} GB/s; times in us, x: times the floor")
    for direction in ("forward", "both"):
        print(f"{direction:<54}{'floor':>8}{'fused':>10}     x{'compiled':>10}     x{'eager':>10}     x")
        for line in rows:
            floor, *times = (line[f"{direction} {k}"] for k in ("floor", "fused", "compiled", "eager"))
            print(f"{line['case']:<54}{floor:8.1f}" + "".join(f"{t:10.1f}{t / floor:6.2f}" for t in times))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Fits with rows over the processes of `torch.distributed`, compared with one process: `python distributed_fit.py 2`.

Each process writes nothing and asserts; the parent's exit status is the worst of theirs.
"""

import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kerneq import kglm
from kerneq.kglm import design

CASES = (kglm.Bernoulli(), 200), (kglm.Poisson(), 0), (kglm.Categorical(), 0)  # with a sampled preconditioner: 0


def data(family):
    g = torch.Generator().manual_seed(0)
    X = torch.randn(301, 2, generator=g, dtype=torch.float64)
    Y = (X[:, 0].sin() > 0).double() + (X[:, 1] > 1)
    return X, Y.clamp(max=1) if isinstance(family, kglm.Binomial) else Y


def run(rank, world, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    for family, design.GRAM in CASES if world == 2 else CASES[:1]:
        X, Y = data(family)
        mine = torch.arange(len(X)).tensor_split(world)[rank]
        plan = kglm.Nystrom(kglm.Matern(1.0), centres=20)
        together = kglm.KernelGLM(plan, family, lam=0.1).fit(X[mine], Y[mine], tol=1e-9, group=dist.group.WORLD)
        centres = together.reduced.features.centres
        alone = kglm.KernelGLM(kglm.Nystrom(kglm.Matern(1.0), centres), family, lam=0.1).fit(X, Y, tol=1e-9)
        torch.testing.assert_close(together.predict(X), alone.predict(X), rtol=0, atol=1e-7)
        for name in ("coefficients", "objective"):  # every process has the same model, to the last bit
            found = getattr(together.result, name).contiguous()
            others = [torch.empty_like(found) for _ in range(world)]
            dist.all_gather(others, found)
            assert all(torch.equal(found, other) for other in others), name
    interrupted = kglm.KernelGLM(plan, family, lam=0.1)
    checkpoint = Path(file).with_name("fit.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # after one step it is not solved
        interrupted.fit(X[mine], Y[mine], max_steps=1, group=dist.group.WORLD, checkpoint=checkpoint)
    dist.barrier()
    seen = []
    interrupted.fit(
        X[mine],
        Y[mine],
        tol=1e-9,
        group=dist.group.WORLD,
        checkpoint=checkpoint,
        progress=lambda p: seen.append(p.step),
    )
    torch.testing.assert_close(interrupted.predict(X), together.predict(X), rtol=0, atol=1e-7)
    assert seen[:1] == ([2] if rank == 0 else [])
    dist.barrier()  # to leave while the other still talks aborts it
    dist.destroy_process_group()


def survive(folder):
    """Fit under `torchrun`; the first process is killed after two steps, and all are started again."""
    facts = os.environ
    first = facts["TORCHELASTIC_RESTART_COUNT"] == "0"
    store = dist.TCPStore(facts["MASTER_ADDR"], int(facts["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"try {facts['TORCHELASTIC_RESTART_COUNT']}", store)  # gloo reads old addresses otherwise
    dist.init_process_group("gloo", store=store, rank=int(facts["RANK"]), world_size=int(facts["WORLD_SIZE"]))
    rank, world, (X, Y) = dist.get_rank(), dist.get_world_size(), data(kglm.Bernoulli())
    mine, steps = torch.arange(len(X)).tensor_split(world)[rank], []

    def report(progress):
        steps.append(progress.step)
        if first and progress.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    glm = kglm.KernelGLM(kglm.Nystrom(kglm.Matern(1.0), centres=20), kglm.Bernoulli(), lam=1e-3)
    checkpoint = folder / "fit.safetensors"
    glm.fit(X[mine], Y[mine], tol=1e-9, group=dist.group.WORLD, checkpoint=checkpoint, progress=report)
    assert not first and (rank > 0 or steps[0] == 3)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "elastic":
        survive(Path(sys.argv[2]))
    else:
        world = int(sys.argv[1])
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(run, (world, str(Path(folder) / "store")), nprocs=world, start_method="fork")

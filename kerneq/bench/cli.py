"""`kerneq bench`: measurements side by side in one run, printed as tables and written as JSON."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure solvers, layers, training, inference and how cost grows.", no_args_is_help=True)

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small and short: whether it runs, not how fast.")]
Out = Annotated[Path, typer.Option(help="The folder for NAME-DEVICE.json.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves PyTorch's choice.")]

RESULTS = Path("benchmarks/results")


@app.command()
def solvers(device: Device = "auto", quick: Quick = False, out: Out = RESULTS, threads: Threads = 0) -> None:
    """The price of a solver's step over the bare map, and the way to the same residual, beside torchdeq."""
    _run("solvers", device, quick, out, threads)


@app.command()
def layer(device: Device = "auto", quick: Quick = False, out: Out = RESULTS, threads: Threads = 0) -> None:
    """One equilibrium layer forward and backward, by gradient rule, beside torchdeq on the same equation."""
    _run("layer", device, quick, out, threads)


@app.command()
def train(device: Device = "auto", quick: Quick = False, out: Out = RESULTS, threads: Threads = 0) -> None:
    """A training step of GEQ-5M and of ResNet-18, and where its time goes."""
    _run("train", device, quick, out, threads)


@app.command()
def inference(device: Device = "auto", quick: Quick = False, out: Out = RESULTS, threads: Threads = 0) -> None:
    """Latency and throughput of prediction."""
    _run("inference", device, quick, out, threads)


@app.command()
def scaling(device: Device = "auto", quick: Quick = False, out: Out = RESULTS, threads: Threads = 0) -> None:
    """How the cost and memory of a layer grow with batch, picture size, steps and width."""
    _run("scaling", device, quick, out, threads)


def _run(name: str, device: str, quick: bool, out: Path, threads: int) -> None:
    import torch
    from rich.console import Console

    from kerneq.bench.run import measurements
    from kerneq.bench.table import Result, save
    from kerneq.training.process import choose

    if threads:
        torch.set_num_threads(threads)
    where = choose(device, 0)
    console = Console()
    results: list[Result] = []
    for result in measurements(name, where, quick):
        result.show(console)
        results.append(result)
        path = save(results, out, where)  # after every table: a command cut short keeps what it has measured
    console.print(f"Written to {path}.")

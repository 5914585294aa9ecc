"""`kerneq bench`: measurements side by side in one run, printed as tables and written as JSON."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure solvers, layers, training, inference and how cost grows.", no_args_is_help=True)

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small and short: whether it runs, not how fast.")]
Out = Annotated[Path, typer.Option(help="The folder for NAME-DEVICE.json.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves PyTorch's choice.")]

RESULTS, PAGE = Path("benchmarks/results"), Path("docs/benchmarks.md")


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


@app.command()
def page(
    results: Annotated[Path, typer.Option(help="The folder with the JSON files.")] = RESULTS,
    page: Annotated[Path, typer.Option(help="The page whose blocks are filled; figures go beside it.")] = PAGE,
) -> None:
    """Draw the figures and fill the tables of the benchmarks page from the results."""
    from rich.console import Console

    from kerneq.bench.page import write

    for line in write(results, page):
        Console().print(line, soft_wrap=True, highlight=False)
    Console().print(f"Written to {page} and {page.with_suffix('')}.", soft_wrap=True, highlight=False)


def _run(name: str, device: str, quick: bool, out: Path, threads: int) -> None:
    # The profiler counts memory; what it has to say about itself does not belong between the tables.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    from rich.console import Console
    from rich.text import Text

    from kerneq.bench.run import measurements
    from kerneq.bench.table import Result, save
    from kerneq.bench.timing import Bench
    from kerneq.training.process import choose_device

    if threads:
        torch.set_num_threads(threads)
    where = choose_device(device, 0)
    console = Console(width=None if sys.stdout.isatty() else 150)  # room for every column in a file
    results: list[Result] = []
    with console.status(f"kerneq bench {name}") as line:
        for result in measurements(name, Bench(where, quick, lambda doing: line.update(Text(doing)))):
            result.show(console)
            results.append(result)
            path = save(results, out, where)  # after every table: a command cut short keeps what it has measured
    console.print(f"Written to {path}.")

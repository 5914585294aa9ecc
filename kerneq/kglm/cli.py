"""`kerneq kglm …`: the experiments on kernel GLMs. torch is imported inside the commands."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Kernel GLMs as equilibrium models: the paper's experiments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

File = Annotated[str, typer.Argument(help="A TOML file of experiments/kglm/.", metavar="[FILE]")]
Changes = Annotated[
    list[str] | None,
    typer.Argument(help="Settings to change, for example seeds=20 epochs=100.", metavar="[KEY=VALUE]..."),
]
Output = Annotated[Path, typer.Option(help="The folder for numbers and figures.")]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: as many as torch likes.", min=0)]


@app.command()
def mnist(
    file: File = "", changes: Changes = None, output: Output = Path("runs/kglm-mnist"), threads: Threads = 0
) -> None:
    """Kernel logistic regression of every MNIST image against its equilibrium (Table 2, Figure 13)."""
    from kerneq.kglm.experiments import commands

    commands.mnist(file, changes or [], output, threads)


@app.command("mnist-train")
def mnist_train(
    file: File = "", changes: Changes = None, output: Output = Path("runs/kglm-mnist-train"), threads: Threads = 0
) -> None:
    """Train the MNIST equilibrium from kernel and from random weights (Figure 14)."""
    from kerneq.kglm.experiments import commands

    commands.mnist_train(file, changes or [], output, threads)


@app.command()
def smooth(
    file: File = "", changes: Changes = None, output: Output = Path("runs/kglm-smooth"), threads: Threads = 0
) -> None:
    """The smooth sequence-to-sequence task: informed, naive and random starts (Figure 5)."""
    from kerneq.kglm.experiments import commands

    commands.smooth(file, changes or [], output, threads)


@app.command()
def denoise(
    file: File = "", changes: Changes = None, output: Output = Path("runs/kglm-denoise"), threads: Threads = 0
) -> None:
    """Image denoising over a grid of spectral norms (Figures 3, 6, 9 to 12, Table 1)."""
    from kerneq.kglm.experiments import commands

    commands.denoise(file, changes or [], output, threads)


@app.command()
def cost(
    file: File = "", changes: Changes = None, output: Output = Path("runs/kglm-cost"), threads: Threads = 0
) -> None:
    """How long each initialisation takes, dense and convolutional (Figure 8)."""
    from kerneq.kglm.experiments import commands

    commands.cost(file, changes or [], output, threads)


if __name__ == "__main__":
    app()

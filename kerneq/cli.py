"""The command line: what can be asked for. The work is in `kerneq.commands`, imported when needed."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from kerneq.commands.failures import guarded

app = typer.Typer(
    name="kerneq",
    help="Kernel equilibrium models: train them, look at them, measure them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Runs = Annotated[Path, typer.Option("--runs", help="The folder that holds the runs.")]


@app.command()
def train(
    file: Annotated[
        str,
        typer.Argument(help="An experiment by its name or its file, or a run folder to --resume.", metavar="[FILE]"),
    ] = "",
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to change, for example optimizer.lr=0.2 seed=1.", metavar="[KEY=VALUE]..."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    name: Annotated[str, typer.Option(help="Name of the run folder; by default that of FILE.")] = "",
    runs: Runs = Path("runs"),
    show_config: Annotated[bool, typer.Option("--show-config", help="Print every setting as TOML and stop.")] = False,
) -> None:
    """Train a model; everything about the run goes into runs/NAME."""
    from kerneq.commands import train as command

    command.run(file, changes or [], resume=resume, name=name, runs=runs, show_config=show_config)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, for example runs/digits.")],
    checkpoint: Annotated[str, typer.Option(help="best (on the held-out images) or last.")] = "best",
    device: Device = "auto",
) -> None:
    """Accuracy and loss of a trained run on the test images; also written to RUN/evaluation.json."""
    from kerneq.commands import evaluate as command

    command.run(run, checkpoint, device)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="A run folder, for example runs/digits.")],
    pictures: Annotated[list[Path], typer.Argument(help="Picture files.", metavar="IMAGE...")],
    which: Annotated[str, typer.Option(help="The best weights (on the held-out images) or the last.")] = "best",
    top: Annotated[int, typer.Option(help="How many classes to show for each picture.", min=1)] = 5,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """What a trained run sees in picture files: classes, probabilities, and whether its equilibrium was found."""
    from kerneq.commands import predict as command

    command.run(run, pictures, which, top, device, as_json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")],
    output: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """One self-contained HTML page about some runs: results, curves, solver behaviour."""
    from kerneq.commands import report as command

    command.run(folders, output)


@app.command()
def data() -> None:
    """The data sets: which are found under KERNEQ_DATA, which are missing and how to get them."""
    from kerneq.commands import data as command

    command.run()


@app.command()
def models() -> None:
    """The models: parameters, equation, paper, published accuracy and ours."""
    from kerneq.commands import models as command

    command.run()


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Where the runs and the report go.")] = Path("runs/demo"),
    epochs: Annotated[int, typer.Option(help="Epochs for each model.", min=1)] = 6,
) -> None:
    """Train small models on the embedded digits and compare them: a few minutes on a CPU, no downloads."""
    from kerneq.commands import demo as command

    command.run(output, epochs)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Benchmarks of solvers, gradients and training speed."""
    import_module("kerneq.bench.cli").app(context.args, prog_name="kerneq bench")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def kglm(context: typer.Context) -> None:
    """Kernel GLMs that are equilibrium models: the paper's experiments."""
    import_module("kerneq.kglm.cli").app(context.args, prog_name="kerneq kglm")


def main() -> None:
    """Run the command; whatever goes wrong for a reason the user can act on ends in one sentence."""
    guarded(app)

"""The program: its commands in the order of its help, and how it ends."""

import io
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ... import __version__
from ..console import complain, printable
from .arguments import PACKAGE
from .errors import describe_error
from .evaluation import evaluate, export, features, predict, report
from .exploration import explore
from .listing import data, experiments, explain, models, verify
from .training import demo, sweep, train

app = typer.Typer(
    name="kerneq",
    help="Kernel equilibrium models: train them, look at them, measure them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(no_args_is_help=True)(train)
about_runs = (evaluate, predict, explore, features, export, report)
for command in (sweep, *about_runs, experiments, models, data, explain, verify, demo):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"kerneq {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(command: Callable[[], object] = app) -> None:
    """Run the program; exit with 2 for a wrong request, 130 for a stopped run, 1 for other known failures.

    Errors a user can act on are shown as their sentence, and so are our warnings; only bugs give a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal lacks must not end a run
            stream.reconfigure(errors="replace")
    usual = warnings.formatwarning
    warnings.formatwarning = partial(_format_warning, usual)
    try:
        command()
    except (KeyboardInterrupt, SystemExit) as stop:  # typer makes the second of the first
        if isinstance(stop, SystemExit) and stop.code != 130:
            raise
        complain("Interrupted.")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)  # the reader of our output is gone
    except Exception as error:
        explained = describe_error(error)
        if explained is None:
            raise
        code, sentence = explained
        complain(sentence)
        sys.exit(code)
    finally:
        warnings.formatwarning = usual


def _format_warning(
    usual: Callable[..., str], message: Warning | str, category: type[Warning], filename: str, *rest: Any
) -> str:
    """A warning from this package without the place it comes from; any other as Python writes it."""
    ours = Path(filename).is_relative_to(PACKAGE)
    return f"kerneq: {printable(str(message))}\n" if ours else usual(message, category, filename, *rest)

"""The command line: measure, print the tables as they are measured, write them as JSON; or make the docs page.

Results go to runs/bench/, which git ignores. Only `--record` replaces the tracked results in benchmarks/results/.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from kerneq.lab.run import TrainingError
from kerneq.lab.training.process import choose_device

from .calls import bench_calls
from .compiled import bench_compiled
from .features.table import fill_table, write_features
from .gradients import bench_gradients, write_gradients
from .kglm import bench_centres, bench_exact, bench_growth, bench_scale
from .layer import bench_layer
from .measure import Setup
from .models import bench_inference, bench_train
from .own import bench_own
from .page import write_page
from .processes import bench_processes
from .resolvent import bench_resolvent
from .results import BenchmarkError, Result, save
from .scaling import bench_scaling
from .solvers import bench_solvers

HERE = Path(__file__).parent
RECORDS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"
FEATURES = HERE.parent / "docs" / "features.md"
OWN = HERE.parent / "docs" / "own-models.md"
SCRATCH = Path("runs/bench")
BENCHMARKS: dict[str, Callable[[Setup], Iterator[Result]]] = {
    "solvers": bench_solvers,
    "layer": bench_layer,
    "train": bench_train,
    "inference": bench_inference,
    "scaling": bench_scaling,
    "compiled": bench_compiled,
    "processes": bench_processes,
    "calls": bench_calls,
    "own": bench_own,
    "gradients": bench_gradients,
    "kglm-scale": bench_scale,
    "kglm-exact": bench_exact,
    "kglm-growth": bench_growth,
    "kglm-centres": bench_centres,
    "resolvent": bench_resolvent,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; what goes wrong for a reason the user can act on ends in one sentence."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "page":
            for line in write_page(options.results, options.page):
                print(line)
            if options.results == RECORDS:
                write_features(RECORDS / "features-cpu.json", FEATURES)
                write_gradients(RECORDS / "gradients-cpu.json", OWN)
            print(f"Written to {options.page} and {options.page.with_suffix('')}.")
        elif options.command == "features":
            result = fill_table(options.repositories, lambda doing: print(doing, flush=True))
            folder = RECORDS if options.record else SCRATCH
            print(f"Written to {save([result], folder, torch.device('cpu'))}.")
        else:
            measure(options)
    except (BenchmarkError, TrainingError, OSError, torch.OutOfMemoryError) as error:
        sys.exit(f"benchmarks: {error}")
    except KeyboardInterrupt:
        sys.exit("benchmarks: interrupted; the tables already printed are saved.")


def measure(options: argparse.Namespace) -> None:
    """Run the benchmark `options.command` and save its tables, each as soon as it is measured."""
    if options.record and options.quick:
        raise BenchmarkError("a --quick run is too short to --record: leave one of them out.")
    device = choose_device(options.device)
    if options.threads < 0:
        raise BenchmarkError(f"--threads must be 0 or more, got {options.threads}.")
    if options.threads:
        torch.set_num_threads(options.threads)
    # float32 is what PyTorch makes of it by default, for every library compared: on a GPU convolutions may round to
    # TF32, matrix products may not.
    torch.backends.cudnn.benchmark = True
    folder = RECORDS if options.record else options.output
    console = Console(width=None if sys.stdout.isatty() else 180)  # room for every column in a file
    results: list[Result] = []
    with console.status(f"benchmarks {options.command}") as status:
        setup = Setup(device, options.quick, lambda doing: status.update(Text(doing)))
        for result in BENCHMARKS[options.command](setup):
            result.show(console)
            results.append(result)
            path = save(results, folder, device)  # after every table: a run cut short keeps what it has measured
    console.print(f"Written to {path}.", soft_wrap=True, highlight=False)


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    shared.add_argument("--quick", action="store_true", help="small and short: whether it runs, not how fast")
    shared.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice")
    shared.add_argument("--output", type=Path, default=SCRATCH, help="the folder for NAME-DEVICE.json (%(default)s)")
    shared.add_argument("--record", action="store_true", help="replace the tracked result in benchmarks/results")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What things cost, side by side.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, benchmark in BENCHMARKS.items():
        commands.add_parser(name, parents=[shared], help=benchmark.__doc__, description=benchmark.__doc__)
    features = commands.add_parser("features", help=fill_table.__doc__, description=fill_table.__doc__)
    features.add_argument("--repositories", type=Path, help="a folder with clones: torchdeq, silva-networks, …")
    features.add_argument("--record", action="store_true", help="replace the tracked result in benchmarks/results")
    page = commands.add_parser("page", help=write_page.__doc__, description=write_page.__doc__)
    page.add_argument("--results", type=Path, default=RECORDS, help="the folder with the JSON files")
    page.add_argument("--page", type=Path, default=PAGE, help="the page whose blocks are filled; figures go beside it")
    return parser


if __name__ == "__main__":
    main()

"""The program `kerneq`, which needs the laboratory."""

import importlib.util
import sys

LABORATORY = ("jinja2", "matplotlib", "PIL", "rich", "sklearn", "tensorboard", "typer")


def main() -> None:
    """Run the command line, or say in one sentence what to install for it."""
    missing = [name for name in LABORATORY if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "install it by `pip install 'kerneq[lab]'`. The library works without."
        print(f"The program kerneq needs {', '.join(missing)}: {remedy}", file=sys.stderr)
        raise SystemExit(2)
    from .lab.cli import main as run

    run()

"""The program `kerneq`: it runs the laboratory's command line, or says in one sentence what to install."""

import importlib.util
import sys

# The modules of `kerneq[lab]`, each with the package that installs it.
LABORATORY = {
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "PIL": "pillow",
    "rich": "rich",
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "typer": "typer",
}


def main() -> None:
    """Run the command line; without the laboratory's packages, name them and exit with code 2."""
    missing = [package for module, package in LABORATORY.items() if importlib.util.find_spec(module) is None]
    if missing:
        sentence = f"The program kerneq needs {', '.join(missing)}: install them by `pip install 'kerneq[lab]'`."
        print(sentence, file=sys.stderr)
        raise SystemExit(2)
    from .lab.cli import main as run

    run()

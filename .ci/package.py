"""Install the wheel and the sdist into environments without the repository, and use them as a stranger would.

Run by .venv/bin/python after `make docs`. The environments see the packages that are installed in .venv, to save their
download, but not its kerneq, which is a link to the repository.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Notebooks that are run, with arguments that keep them within seconds; of the others what they import is tried.
RUN = {
    "graph_chains": ["--length", "6", "--steps", "10"],
    "kernel_logistic": ["--samples", "60"],
    "counts_per_exposure": ["--samples", "3000", "--centres", "60"],
}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command in a folder, with nothing of the caller's Python; return what it printed, or end with that."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=kept, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\nfailed")
    return done.stdout


def install(package: Path, folder: Path) -> Path:
    """Return the programs of a new environment that has this package."""
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip = folder / "bin" / "pip"
    run(pip, "uninstall", "--quiet", "--yes", "setuptools", cwd=folder)  # Python 3.11 brings one that is too old
    options = ("--no-index", "--no-deps", "--ignore-installed", "--no-build-isolation")
    run(pip, "install", "--quiet", *options, package, cwd=folder)
    where = run(folder / "bin" / "python", "-c", "import kerneq; print(kerneq.__file__)", cwd=folder)
    assert Path(where.strip()).is_relative_to(site), where
    return folder / "bin"


def list_files(programs: Path) -> set[str]:
    """Return the files of the package in an environment."""
    (package,) = programs.parent.glob("lib/python*/site-packages/kerneq")
    return {str(file.relative_to(package)) for file in package.rglob("*") if file.suffix != ".pyc"}


def read_code(notebook: Path) -> str:
    """Return the code of a notebook's cells."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def try_notebook(notebook: Path, python: Path, folder: Path) -> None:
    """Run the cells of a notebook in an empty folder."""
    folder.mkdir()
    arguments = ["notebook", *RUN[notebook.stem]]
    code = re.sub(r"^sys\.argv = .*$", f"sys.argv = {arguments}", read_code(notebook), flags=re.MULTILINE)
    (folder / "cells.py").write_text(code, encoding="utf-8")
    run(python, "cells.py", cwd=folder)
    assert list(folder.glob("*.png")), f"{notebook.stem} drew nothing"


def try_imports(notebooks: list[Path], python: Path, folder: Path) -> None:
    """Import all that any notebook imports, in one process."""
    nodes = [node for notebook in notebooks for node in ast.parse(read_code(notebook)).body]
    lines = {ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)}
    run(python, "-c", "\n".join(sorted(lines)), cwd=folder)


def main() -> None:
    notebooks = sorted((ROOT / "build" / "docs" / "_downloads").glob("*/*.ipynb"))
    short = [notebook for notebook in notebooks if notebook.stem in RUN]
    assert len(short) == len(RUN), "notebooks are missing: `make docs` first"
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(2) as pool:
        folder = Path(temporary)
        build = f"from setuptools import build_meta; build_meta.build_sdist({temporary!r})"
        run(sys.executable, "-c", build, cwd=ROOT)
        (sdist,) = folder.glob("*.tar.gz")
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation")
        run(*pip, sdist, cwd=folder)
        (wheel,) = folder.glob("*.whl")
        by_wheel, by_sdist = pool.map(install, (wheel, sdist), (folder / "wheel", folder / "sdist"))
        assert list_files(by_wheel) == list_files(by_sdist)
        demo = pool.submit(run, by_sdist / "kerneq", "demo", "--epochs", "1", cwd=folder / "sdist")
        try_imports(notebooks, by_wheel / "python", folder / "wheel")
        for notebook in short:
            try_notebook(notebook, by_wheel / "python", folder / notebook.stem)
        assert "report" in demo.result()
    print(f"{sdist.name} and {wheel.name} install the same files, which run `kerneq demo` outside of the repository.")
    print(f"{len(short)} of {len(notebooks)} notebooks ran there; what the others import is there.")


if __name__ == "__main__":
    main()

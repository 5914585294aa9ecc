"""Triton programs without a card: in Triton's interpreter, which must be chosen before Triton is imported.

So the `interpreted_*.py` run outside of this process: one that imports torch and Triton once, and then forks for each.
The interpreter multiplies bfloat16 matrices wrongly (as their bits), so half precision is float16 where matrices are
multiplied.

usage: interpreter.py SCRIPT...; prints {SCRIPT: what went wrong, or nothing}
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import traceback
from typing import IO

import pytest

from kerneq.fused.device import HAS_TRITON

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed, or before 3.4.")


@functools.cache
def outcomes() -> dict[str, str]:
    """What went wrong in each of the scripts, here and beside the kernel GLMs."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    scripts = [str(path) for path in sorted(pathlib.Path(__file__).parents[1].glob("*/interpreted_*.py"))]
    command = [sys.executable, __file__, *scripts]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return {pathlib.Path(script).name: wrong for script, wrong in json.loads(run.stdout).items()}


def run_interpreted(script: str) -> None:
    """Fail with what the script raises where something is wrong."""
    wrong = outcomes()[script]
    version = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    if version < (3, 7) and "arrays can be converted to Python scalars" in wrong:
        pytest.skip("Triton's interpreter before 3.7 takes loop bounds by int() of an array, which NumPy 2.4 refuses.")
    assert not wrong, wrong


def begin(script: str) -> tuple[int, IO[str]]:
    """The script in a child of this process, and the file to which it writes what goes wrong."""
    said = tempfile.TemporaryFile("w+")
    child = os.fork()
    if child == 0:
        sys.path.insert(0, str(pathlib.Path(script).parent))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(script, run_name="__main__")
        except BaseException:
            said.write(traceback.format_exc())
            said.flush()
        os._exit(0)
    return child, said


def end(child: int, said: IO[str]) -> str:
    """What went wrong in the child, once it has ended."""
    _, status = os.waitpid(child, 0)
    with said:
        said.seek(0)
        return said.read() or (f"ended with status {status}" if status else "")


if __name__ == "__main__":
    import triton.language  # noqa: F401

    import kerneq.cells  # noqa: F401

    running = {script: begin(script) for script in sys.argv[1:]}  # side by side
    print(json.dumps({script: end(*child) for script, child in running.items()}))

"""Triton programs without a card: in Triton's interpreter, which must be chosen before Triton is imported.

So each `interpreted_*.py` runs in a process of its own. The interpreter multiplies bfloat16 matrices wrongly (as their
bits), so half precision is float16 where matrices are multiplied.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Triton is not installed.")


def run_interpreted(script: str) -> None:
    """Run a script of this folder; it raises where something is wrong, and prints "done" at the end."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    path = pathlib.Path(__file__).with_name(script)
    run = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=280)
    version = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    if version < (3, 7) and "arrays can be converted to Python scalars" in run.stderr:
        pytest.skip("Triton's interpreter before 3.7 takes loop bounds by int() of an array, which NumPy 2.4 refuses.")
    assert run.returncode == 0 and run.stdout.endswith("done\n"), run.stderr

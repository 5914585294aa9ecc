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

import numpy as np
import pytest


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Triton is not installed.")
# Until 3.7 it takes the bounds of a loop by int() of an array of one number, which NumPy 2.4 refuses.
loops_fail = (
    has_triton and _version(np.__version__) >= (2, 4) and _version(importlib.metadata.version("triton")) < (3, 7)
)
needs_loops = pytest.mark.skipif(loops_fail, reason="This Triton's interpreter cannot loop with NumPy 2.4 or later.")


def run_interpreted(script: str) -> None:
    """Run a script of this folder; it raises where something is wrong, and prints "done" at the end."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    path = pathlib.Path(__file__).with_name(script)
    run = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0 and run.stdout.endswith("done\n"), run.stderr

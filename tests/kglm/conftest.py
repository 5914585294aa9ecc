"""The experiments and the interpreter of Triton programs are importable."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "experiments" / "kglm"), str(ROOT / "tests" / "fused")]

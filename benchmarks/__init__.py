"""What things cost, measured side by side.

`python -m benchmarks solvers | layer | train | inference | scaling | calls` measures; `python -m benchmarks page` draws
the figures and fills the tables of docs/benchmarks.md from the recorded results.
"""

import os

# Silence the log of PyTorch's profiler, which counts memory here; it reads these when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

"""Where a run came from: versions, source revision, device and seed; a number in a report is traced by these."""

import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .. import __version__


def environment(seed: int, device: torch.device, processes: int) -> dict[str, Any]:
    """The facts about this start of a run, as environment.json has them."""
    gpu = device.type == "cuda"
    return {
        "kerneq": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "revision": revision(),
        "device": torch.cuda.get_device_name(device) if gpu else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "processes": processes,
        "seed": seed,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def revision() -> str | None:
    """The git revision of the package's source, with `+changes` if files differ; None outside a checkout."""
    source = Path(__file__).resolve().parents[2]
    head = _git(source, "rev-parse", "HEAD")
    if head is None or not (source / "pyproject.toml").exists():
        return None
    return head + ("+changes" if _git(source, "status", "--porcelain", "--untracked-files=no", "kerneq") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, None where there is no git or it refuses."""
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None

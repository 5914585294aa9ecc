"""Where numbers come from: versions, the source's revision, the machine."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from ... import __version__


def machine(device: torch.device) -> dict[str, Any]:
    """What numbers are computed by: versions, revision of the source, device and threads, as every record has them."""
    return {
        "kerneq": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "revision": revision(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
    }


def revision() -> str | None:
    """The git revision of the package's source, with `+changes` if files differ; None outside a checkout."""
    source = Path(__file__).resolve().parents[3]
    head = _git(source, "rev-parse", "HEAD")
    if head is None or not (source / "pyproject.toml").exists():
        return None
    return head + ("+changes" if _git(source, "status", "--porcelain", "--untracked-files=no", "kerneq") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, None where there is no git or it refuses; without a lock, which a kill would leave behind."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None

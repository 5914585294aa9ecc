"""Where a run came from: versions, source revision, device and seed."""

import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import kerneq
from kerneq.run.config import Config
from kerneq.training.files import write_atomically
from kerneq.training.process import Process


def environment(config: Config, process: Process) -> dict[str, Any]:
    """The facts that a number in a report is traced by."""
    gpu = process.device.type == "cuda"
    return {
        "kerneq": kerneq.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "revision": revision(),
        "device": torch.cuda.get_device_name(process.device) if gpu else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "processes": process.world,
        "seed": config.seed,
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def record(path: Path, facts: dict[str, Any], step: int) -> None:
    """Write the origin of a new run, or add a resumption to that of an old one."""
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if written is None or step == 0:
        written = facts | {"resumed": []}
    else:
        written["resumed"].append(facts | {"step": step})
    write_atomically(path, (json.dumps(written, indent=2) + "\n").encode())


def revision() -> str | None:
    """The git revision of the package's source, with `+changes` if files differ; None outside a checkout."""
    source = Path(__file__).resolve().parents[2]
    head = _git(source, "rev-parse", "HEAD")
    if head is None or not (source / "pyproject.toml").exists():
        return None
    return head + ("+changes" if _git(source, "status", "--porcelain", "--untracked-files=no", "kerneq") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None

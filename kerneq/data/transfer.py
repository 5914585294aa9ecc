"""Moving small host arrays to the device of the pixels without making the host wait."""

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":  # from pinned memory the copy is asynchronous
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

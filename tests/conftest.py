import pytest
import torch


@pytest.fixture(scope="module")
def float64():
    """Mathematics is checked in float64, on one thread; asked for by module, because other folders run in float32."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)

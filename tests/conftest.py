import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """Small models are fastest on one thread, and the tests share the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def float64(one_thread):
    """Mathematics is checked in float64; asked for by module, because other folders run in float32."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(dtype)

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The machines that run the tests are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)

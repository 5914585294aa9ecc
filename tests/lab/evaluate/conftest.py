"""Three trained runs."""

import pytest
from helpers import trained


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Three runs of an epoch on the embedded digits: two that differ in their seed, and one on five classes."""
    folder = tmp_path_factory.mktemp("evaluated") / "runs"
    for seed in (0, 1):
        trained(folder / "seeds" / f"dense-{seed}", "model.name=geq-dense-tiny", f"seed={seed}")
    trained(folder / "five", "model.name=geq-tiny", "data.subset=first-five-classes", "data.validation=0")
    return folder

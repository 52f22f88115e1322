import pytest

from spec_kernels.testing.tiny_models import Tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    """A tiny target and drafter on disk."""
    return Tiny.write(tmp_path_factory.mktemp("tiny"))

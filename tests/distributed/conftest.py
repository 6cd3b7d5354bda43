import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pool():
    """Up to four worker processes for the whole session: see pool.py."""
    workers = Pool()
    yield workers
    workers.close()

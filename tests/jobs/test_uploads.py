from typing import Any

import pytest

from pagemill.jobs.errors import StorageError
from pagemill.jobs.storage import Storage
from pagemill.jobs.uploads import Uploads


class Refusing:
    """A store that has no room for one key."""

    def __init__(self, inner: Storage, key: str) -> None:
        self._inner = inner
        self._key = key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put(self, key: str, data: bytes) -> Any:
        if key == self._key:
            raise StorageError("full")
        return self._inner.put(key, data)


def test_all_is_stored_when_the_block_ends(storage: Storage) -> None:
    with Uploads(storage) as uploads:
        for n in range(30):
            uploads.put(f"k/{n}", str(n).encode())
    assert {info.key: storage.get(info.key) for info in storage.list("k/")} == {
        f"k/{n}": str(n).encode() for n in range(30)
    }


@pytest.mark.parametrize("which", ["k/0", "k/29"])
def test_one_failure_fails_the_block(local_storage: Storage, which: str) -> None:
    with pytest.raises(StorageError, match="full"), Uploads(Refusing(local_storage, which)) as uploads:  # type: ignore[arg-type]
        for n in range(30):
            uploads.put(f"k/{n}", b"x")


def test_an_error_of_the_caller_is_the_one_that_is_raised(local_storage: Storage) -> None:
    with pytest.raises(ZeroDivisionError), Uploads(Refusing(local_storage, "k/0")) as uploads:  # type: ignore[arg-type]
        uploads.put("k/0", b"x")
        raise ZeroDivisionError

import subprocess
import sys

import pytest

import pagemill.jobs


@pytest.mark.parametrize("name", pagemill.jobs.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(pagemill.jobs, name).__name__ == name
    assert name in dir(pagemill.jobs)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="nothing_such"):
        pagemill.jobs.nothing_such  # noqa: B018


def test_the_floor_costs_nothing_until_it_is_used() -> None:
    code = "import sys, pagemill.jobs; print(*{'pyarrow', 'boto3', 'redis', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_a_client_brings_no_torch() -> None:
    code = "import sys; from pagemill.jobs import Client, SyncClient; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"

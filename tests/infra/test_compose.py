"""infra/compose.yaml, checked without an engine: a valid file whose every reference leads somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from pagemill.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "infra" / "compose.yaml"
TEXT = FILE.read_text()
RESOLVED: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", TEXT))
SERVICES: dict[str, dict[str, Any]] = RESOLVED["services"]


def test_it_is_what_the_compose_specification_allows() -> None:
    pytest.importorskip(
        "check_jsonschema", reason="pip install 'pagemill[test]' brings the specification's schema"
    )
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_docker_compose_itself_takes_it() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("docker compose is not here")
    words = ["docker", "compose", "-f", str(FILE), "--profile", "*", "config", "--quiet"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_every_variable_has_a_value_of_its_own() -> None:
    left = re.sub(r"\$\{\w+:-[^}]*\}|#.*", "", TEXT)
    assert "$" not in left


def test_services_wait_for_services_that_can_tell() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES, f"{name} waits for {other}"
            if how["condition"] == "service_healthy":
                assert "test" in SERVICES[other]["healthcheck"]
            if how["condition"] == "service_completed_successfully":
                assert "restart" not in SERVICES[other]


def test_every_image_is_of_a_version_or_built_here() -> None:
    for name, service in SERVICES.items():
        if "build" in service:
            build = service["build"]
            dockerfile = ROOT / build["dockerfile"]
            assert (FILE.parent / build["context"]).resolve() == ROOT
            assert dockerfile.is_file()
            if "target" in build:
                assert re.search(rf"^FROM \S+ AS {build['target']}$", dockerfile.read_text(), re.MULTILINE)
        elif not service["image"].startswith("pagemill:"):
            assert re.search(r":[\w.-]*\d[\w.-]*$", service["image"]), f"{name}: {service['image']} moves"
            assert "latest" not in service["image"]
    built = {service["image"] for service in SERVICES.values() if "build" in service}
    assert {s["image"] for s in SERVICES.values() if s["image"].startswith("pagemill:")} <= built
    gone = re.fullmatch(r"(docker\.io/)?minio/minio(:.*)?", SERVICES["minio"]["image"])
    assert not gone, "that one has left Docker Hub"


def test_ports_are_open_on_this_machine_only_and_volumes_exist() -> None:
    for name, service in SERVICES.items():
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if not source.startswith((".", "/")):
                assert source in RESOLVED["volumes"], f"{name}: {source}"
            elif source.endswith(".py"):
                assert (FILE.parent / source).is_file()


@pytest.mark.parametrize("name", ["worker-cpu", "worker-gpu", "cli", "bucket"])
def test_what_a_service_is_told_are_settings_that_make_sense(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = SERVICES[name]["environment"]
    for variable, value in given.items():
        field = variable.removeprefix("PAGEMILL_").lower()
        assert field in {*WorkerSettings.model_fields, "demo_model"}, variable
        monkeypatch.setenv(variable, str(value))
    settings = WorkerSettings.load()
    for url in (settings.redis_url, str(settings.s3_endpoint)):
        parts = urlsplit(url)
        assert parts.hostname in SERVICES
        target = SERVICES[str(parts.hostname)]
        assert any(str(port).endswith(f":{parts.port}") for port in target["ports"])
    assert settings.secrets() >= {"pagemill-redis", "pagemill-minio"}


def test_both_ends_have_the_same_passwords_and_the_tests_the_same_bucket() -> None:
    worker, tests = SERVICES["worker-cpu"]["environment"], SERVICES["tests"]["environment"]
    minio = SERVICES["minio"]["environment"]
    assert (
        minio["MINIO_ROOT_PASSWORD"]
        == worker["PAGEMILL_S3_SECRET_KEY"]
        == tests["PAGEMILL_TEST_S3_SECRET_KEY"]
    )
    assert (
        minio["MINIO_ROOT_USER"] == worker["PAGEMILL_S3_ACCESS_KEY"] == tests["PAGEMILL_TEST_S3_ACCESS_KEY"]
    )
    command = SERVICES["redis"]["command"]
    password = command[command.index("--requirepass") + 1]
    assert password == urlsplit(worker["PAGEMILL_REDIS_URL"]).password
    assert password == urlsplit(tests["PAGEMILL_TEST_REDIS_URL"]).password
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert urlsplit(worker["PAGEMILL_STORE"]).netloc == urlsplit(tests["PAGEMILL_TEST_S3_URL"]).netloc


def test_a_gpu_worker_has_a_gpu_and_the_others_have_none() -> None:
    (device,) = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert "deploy" not in SERVICES["worker-cpu"]
    assert SERVICES["worker-gpu"]["profiles"] != SERVICES["worker-cpu"]["profiles"]

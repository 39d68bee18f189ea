"""infra/k8s, checked without a cluster: valid objects that fit each other, the settings and the endpoints."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagemill.jobs.tickets import queue_name
from pagemill.worker.endpoints import PATHS
from pagemill.worker.main import LEAVE_S
from pagemill.worker.metrics import Figures
from pagemill.worker.settings import WorkerSettings

FOLDER = Path(__file__).resolve().parents[2] / "infra" / "k8s"
OBJECTS: list[dict[str, Any]] = [
    document
    for file in sorted(FOLDER.glob("*.yaml"))
    if file.name != "kustomization.yaml"
    for document in yaml.safe_load_all(file.read_text())
]
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())


def the(kind: str) -> dict[str, Any]:
    (found,) = [one for one in OBJECTS if one["kind"] == kind]
    return found


POD = the("Deployment")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
CONFIG = the("ConfigMap")["data"]


@pytest.mark.parametrize(
    "one", [o for o in OBJECTS if "keda" not in o["apiVersion"]], ids=lambda one: one["kind"]
)
def test_each_object_is_what_kubernetes_knows(one: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's own imports
        validate = pytest.importorskip(
            "kubernetes_validate", reason="pip install 'pagemill[test]' brings the schemas"
        )
    validate.validate(one, "1.32", strict=True)


def test_kustomize_puts_them_together() -> None:
    assert {FOLDER / name for name in KUSTOMIZATION["resources"]} == {
        file for file in FOLDER.glob("*.yaml") if file.name != "kustomization.yaml"
    }
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    ended = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    built = list(yaml.safe_load_all(ended.stdout))
    assert len(built) == len(OBJECTS)
    deployment = next(one for one in built if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith(KUSTOMIZATION["images"][0]["newName"])


def test_what_workers_are_told_are_settings_that_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CONFIG.items():
        assert name.removeprefix("PAGEMILL_").lower() in WorkerSettings.model_fields
        assert isinstance(value, str), f"{name} must be quoted"
        assert "SECRET" not in name
        monkeypatch.setenv(name, value)
    settings = WorkerSettings.load()
    assert settings.metrics_host == "0.0.0.0"
    assert settings.metrics_port in [port["containerPort"] for port in CONTAINER["ports"]]
    assert settings.choices[0].source.startswith(
        next(mount["mountPath"] for mount in CONTAINER["volumeMounts"] if mount["name"] == "models")
    )
    annotations = the("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(settings.metrics_port)
    assert annotations["prometheus.io/path"] in PATHS


def test_probes_ask_for_what_the_worker_answers() -> None:
    named = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    paths = {}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = CONTAINER[kind]["httpGet"]
        assert asked["port"] in named
        assert asked["path"] in PATHS
        paths[kind] = asked["path"]
        assert CONTAINER[kind]["timeoutSeconds"] > 5  # a stuck loop is told after five seconds
    assert paths["livenessProbe"] == "/livez", "a Redis that is away must not restart workers"
    assert paths["readinessProbe"] == "/readyz"
    image = (FOLDER.parent / "Dockerfile.cuda").read_text()
    assert f"EXPOSE {named['http']}" in image


def test_references_lead_somewhere() -> None:
    deployment = the("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    volumes, mounts = (
        {one["name"] for one in found} for found in (POD["volumes"], CONTAINER["volumeMounts"])
    )
    assert volumes == mounts
    assert the("ConfigMap")["metadata"]["name"] in [
        source["configMapRef"]["name"] for source in CONTAINER["envFrom"] if "configMapRef" in source
    ]
    scaled = the("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    secret = next(source["secretRef"]["name"] for source in CONTAINER["envFrom"] if "secretRef" in source)
    auth = the("TriggerAuthentication")
    assert {one["name"] for one in auth["spec"]["secretTargetRef"]} == {secret}
    named = {t["authenticationRef"]["name"] for t in scaled["triggers"] if "authenticationRef" in t}
    assert named == {auth["metadata"]["name"]}


def test_it_leaves_before_a_spot_node_does_and_writes_only_where_it_may() -> None:
    assert LEAVE_S < POD["terminationGracePeriodSeconds"] <= 25
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["securityContext"]["runAsUser"] == 10001  # the images' user
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    places = {mount["mountPath"] for mount in CONTAINER["volumeMounts"] if not mount.get("readOnly")}
    assert {"/cache", "/tmp", "/scratch", "/dev/shm"} <= places
    assert next(one["value"] for one in CONTAINER["env"] if one["name"] == "TMPDIR") in places


def test_scaling_counts_what_waits_and_what_runs() -> None:
    triggers = {trigger["type"]: trigger["metadata"] for trigger in the("ScaledObject")["spec"]["triggers"]}
    assert triggers["redis"]["listName"] == queue_name(CONFIG["PAGEMILL_NAME"])
    slots = CONFIG["PAGEMILL_SLOTS"]
    assert triggers["redis"]["listLength"] == triggers["prometheus"]["threshold"] == slots
    (metric,) = re.findall(r"pagemill_\w+", triggers["prometheus"]["query"])
    assert metric in {family.name for family in Figures().registry.collect()}

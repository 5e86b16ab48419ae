"""``meshwright doctor`` and the tested range of the stack."""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from typer.testing import CliRunner

import meshwright_hf
from meshwright_hf import versions
from meshwright_hf.launch import launcher
from meshwright_hf.launch.job import Launch
from meshwright_hf.versions import SAID_VARIABLE, TESTED, UntestedVersionWarning, place, warn_outside_range
from meshwright_tools import doctor
from meshwright_tools.cli import app

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def not_yet_warned() -> Iterator[None]:
    warn_outside_range.cache_clear()
    yield
    warn_outside_range.cache_clear()


def with_versions(monkeypatch: pytest.MonkeyPatch, **found: str | None) -> None:
    """Pretend that these are installed; of the rest, the newest tested."""
    installed = {package: tested.newest for package, tested in TESTED.items()} | found
    monkeypatch.setattr(versions, "installed", installed.get)
    monkeypatch.setattr(doctor, "installed", installed.get)


@pytest.mark.parametrize(
    ("package", "version", "expected"),
    [
        ("torch", "2.10.9", "older"),
        ("torch", "2.11.0", "tested"),
        ("torch", "2.14.1+cu130", "tested"),
        ("torch", "2.13.0.dev20260101", "tested"),
        ("torch", "2.15.0a0", "newer"),
        ("torch", "3.0", "newer"),
        ("transformers", "5.9.1", "older"),
        ("transformers", "5.24.2", "tested"),
        ("transformers", "5.100.0", "newer"),
    ],
)
def test_versions_are_compared_by_number(package: str, version: str, expected: str) -> None:
    assert place(package, version) == expected


def test_the_range_is_what_is_declared_and_what_is_tested() -> None:
    """Lower ends: pyproject.toml, make test-oldest. Upper ones: make test-newest, and constraints.txt for the rest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    makefile, pinned = (ROOT / "Makefile").read_text(), (ROOT / "constraints.txt").read_text().splitlines()
    for package in ("torch", "transformers", "accelerate"):
        assert f"{package}>={TESTED[package].oldest}" in declared
        assert f"{package}=={TESTED[package].oldest}.0" in makefile
    newest = makefile[makefile.index("NEWEST ?= ") :].split("\n")[0].split()
    for package, tested in TESTED.items():
        assert any(line.startswith(f"{package}=={tested.newest}.") for line in [*newest, *pinned]), package


def test_a_warning_names_the_range_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, transformers="5.16.2", torch="2.15.0", trl=None)
    with pytest.warns(UntestedVersionWarning) as caught:
        warn_outside_range()
        warn_outside_range()
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "torch 2.15.0 (newer than the tested 2.11 to 2.14)" in message
    assert "transformers 5.16.2 (older than the tested 5.17 to 5.24)" in message
    assert message.endswith(": pip install 'torch==2.14.*' 'transformers==5.24.*'")
    assert "accelerate" not in message
    assert "trl" not in message


@pytest.mark.parametrize("use", ["register", "accelerate", "trainer", "deepspeed", "datasets"])
def test_whoever_uses_the_stack_is_warned(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the call then fails, which the version may be the reason of."""
    if use == "deepspeed":
        pytest.importorskip("deepspeed", reason="the environment of the oldest versions has no DeepSpeed")
    calls: dict[str, Callable[[], Any]] = {
        "register": lambda: meshwright_hf.register(take_over="tp"),  # type: ignore[arg-type]
        "accelerate": lambda: meshwright_hf.accelerate.prepare(None),  # type: ignore[arg-type]
        "trainer": lambda: meshwright_hf.MeshwrightTrainer(meshwright=3),  # type: ignore[arg-type]
        "deepspeed": lambda: meshwright_hf.deepspeed.initialize(),
        "datasets": lambda: meshwright_hf.datasets.TokenRows(datasets.Dataset.from_dict({"text": ["a"]})),
    }
    with_versions(monkeypatch, torch="2.15.0")
    with pytest.warns(UntestedVersionWarning) as caught, pytest.raises(ValueError):
        calls[use]()
    ours = [warning for warning in caught if warning.category is UntestedVersionWarning]  # imports may warn too
    assert [warning.filename for warning in ours] == [__file__]


def test_a_warning_names_the_line_of_the_program_behind_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a trainer of TRL calls MeshwrightTrainer's constructor."""
    with_versions(monkeypatch, torch="2.15.0")
    library: dict[str, Any] = {"__name__": "trl.trainer", "warn_outside_range": warn_outside_range}
    exec("def make_trainer(): warn_outside_range()", library)
    with pytest.warns(UntestedVersionWarning) as caught:
        library["make_trainer"]()
    assert caught[0].filename == __file__


def test_the_launcher_names_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of a program has run yet."""
    with_versions(monkeypatch, torch="2.15.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = CliRunner().invoke(app, ["launch", "--cpu", "--num_processes", "100000", __file__])
    untested, refused = done.stderr.splitlines()
    assert done.exit_code == 2 and "100000 processes" in refused
    assert untested.startswith("meshwright launch: Meshwright is not tested with torch 2.15.0 (newer than")


def test_the_processes_of_the_launcher_do_not_repeat_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless their packages are others."""
    with_versions(monkeypatch, torch="2.15.0")
    job = Launch(script=__file__, num_processes=1)
    monkeypatch.setenv(SAID_VARIABLE, launcher._environment(job, True)[SAID_VARIABLE])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_outside_range()
    warn_outside_range.cache_clear()
    with_versions(monkeypatch, torch="2.16.0")
    with pytest.warns(UntestedVersionWarning, match="2.16.0"):
        warn_outside_range()


def test_no_warning_in_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_outside_range()


@pytest.mark.parametrize(
    ("package", "version", "status", "text"),
    [
        ("transformers", "5.16.2", "problem", "5.16.2 is older than 5.17"),
        ("transformers", "6.0.0", "warning", "5.17 to 5.24: pip install 'transformers==5.24.*'"),
        ("torch", None, "problem", "not installed"),
        ("deepspeed", None, "note", "not installed; needed for DeepSpeed's ZeRO"),
        ("datasets", "4.0.0", "warning", "older than the tested versions, 5.2: pip install"),
    ],
)
def test_packages(package: str, version: str | None, status: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, **{package: version})
    found = {finding.topic: finding for finding in doctor._packages()}
    assert found[package].status == status
    assert text in found[package].text
    assert {finding.status for topic, finding in found.items() if topic != package} == {"ok"}


def test_this_machine_can_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    text, as_json = (CliRunner().invoke(app, ["doctor", *options]) for options in ([], ["--json"]))
    assert (text.exit_code, as_json.exit_code) == (0, 0), text.output
    assert "two ranks on this machine meet and all-reduce, over lo" in text.output
    assert "0 problems" in text.output
    content = json.loads(as_json.output)
    assert content["problem"] is False
    assert content["tested"]["torch"] == {"oldest": "2.11", "newest": "2.14"}
    assert {finding["topic"] for finding in content["findings"]} >= {"python", *TESTED, "GPUs", "gloo", "cores"}


def test_an_interface_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    line = next(line for line in done.output.splitlines() if " gloo " in line)
    assert line.startswith("PROBLEM")
    assert "GLOO_SOCKET_IFNAME=nosuch0" in line

"""The files that start a plan on a cluster, checked by the schedulers' own schemas; Slurm's and Ray's are also run."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from meshwright.choose.given_plan import fields_of_text
from meshwright_tools.cli import app
from meshwright_tools.cli.launch import _own_options

# Of JobSet 0.9 and SkyPilot 0.14.1, without what the files do not use.
SCHEMAS = json.loads((Path(__file__).parents[1] / "data" / "scheduler_schemas.json").read_text())
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
}


def emitted(folder: Path, scheduler: str, *options: str, plan: str = "dp8 tp2 zero1") -> str:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    common = ["plan", "weigh", "--model", str(folder / "config.json"), "--seq-len", "64", "--global-batch", "16"]
    done = CliRunner().invoke(app, [*common, "--plan", plan, "--emit", scheduler, *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def options_of(script: str) -> dict[str, str]:
    """The options of ``meshwright launch`` in a script of a shell."""
    (command,) = re.findall(r"meshwright launch((?:.*\\\n)*)", script)
    lines = [line.strip(" \\").partition(" ") for line in command.splitlines() if line.strip(" \\")]
    found = {name: value for name, _, value in lines if name.startswith("--")}
    assert set(found) <= _own_options(), set(found) - _own_options()
    return found


def plan_in(text: str) -> dict[str, object]:
    return fields_of_text(text, "the file")


@pytest.mark.parametrize(("scheduler", "schema"), [("kubernetes", "jobset"), ("skypilot", "skypilot")])
@pytest.mark.parametrize("device", ["h100", "mi300x", "cpu"])
def test_a_manifest_follows_the_scheduler_s_schema(scheduler: str, schema: str, device: str, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="checks schemas: pip install jsonschema")
    text = emitted(tmp_path, scheduler, "--gpus", "16", "--gpus-per-node", "8", "--gpu", device)
    manifest = yaml.safe_load(text)
    jsonschema.validate(manifest, SCHEMAS[schema])
    for place in places(manifest):  # a name that the scheduler does not know
        if "name" in place or "image" in place:
            place["nmae"] = 1
    with pytest.raises(jsonschema.ValidationError, match="'nmae' was unexpected"):
        jsonschema.validate(manifest, SCHEMAS[schema])


def places(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*([value] if isinstance(value, dict) else []), *(place for part in inner for place in places(part))]


@pytest.mark.quick
@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes", "skypilot"])
def test_a_file_starts_the_plan_on_every_node(scheduler: str, tmp_path: Path) -> None:
    text = emitted(tmp_path, scheduler, "--gpus", "16", "--gpus-per-node", "8", "--gpu", "h100")
    if scheduler == "kubernetes":
        job = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
        container = job["template"]["spec"]["containers"][0]
        script, value = container["args"][0], container["env"][0]["value"]
        assert job["completions"] == job["parallelism"] == 2 and job["completionMode"] == "Indexed"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        exits = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
        assert exits["values"] == [75] and exits["containerName"] == container["name"]
    elif scheduler == "skypilot":
        task = yaml.safe_load(text)
        script, value = task["run"], task["envs"]["MESHWRIGHT_PLAN"]
        assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H100:8"
        assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    else:
        script, value = text, shlex.split(re.findall(r"export MESHWRIGHT_PLAN=(.*)", text)[0])[0]
        assert "#SBATCH --nodes=2\n" in text and "#SBATCH --gpus-per-node=8\n" in text
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=True).stderr == ""
    options = options_of(script)
    assert {"--num_machines", "--machine_rank", "--main_process_ip", "--job_id"} <= set(options)
    assert "--cpu" not in options and options["--mixed_precision"] == "bf16"
    fields = plan_in(value)
    assert (fields["dp"], fields["tp"], fields["zero_stage"]) == (8, 2, 1)


@pytest.mark.quick
def test_one_node_of_cpus_asks_for_no_gpus(tmp_path: Path) -> None:
    options = ("--gpus", "2", "--gpu", "cpu")
    for scheduler in ("slurm", "kubernetes", "skypilot"):
        text = emitted(tmp_path, scheduler, *options, plan="dp2")
        assert "gpu" not in text.lower() and "accelerators" not in text and "--cpu" in options_of(text)
    script = emitted(tmp_path, "ray", *options, plan="dp2")
    assert 'TorchConfig(backend="gloo")' in script and "num_workers=2, use_gpu=False" in script


@pytest.mark.quick
def test_a_batch_file_counts_failures_and_not_preemptions(tmp_path: Path) -> None:
    """A job that has been preempted many times still survives the loss of a node; one that always fails ends."""
    (tmp_path / "job").write_text(emitted(tmp_path, "slurm", "--gpus", "2", "--gpu", "cpu", plan="dp2"))
    for name, text in {"srun": "exit $CODE", "scontrol": "echo $1 >> asked", "sleep": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def is_requeued(code: int, restarts: int) -> bool:
        (tmp_path / "asked").write_text("")
        given = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "CODE": str(code),
                 "SLURM_RESTART_COUNT": str(restarts), "PATH": f"{tmp_path}:{os.environ['PATH']}"}  # fmt: skip
        done = subprocess.run(["bash", "job"], cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
        assert done.returncode == code and not done.stderr, done.stderr
        return "requeue" in (tmp_path / "asked").read_text()

    assert not is_requeued(1, 0), "an error of the program is not mended by another start"
    assert all(is_requeued(75, restarts) for restarts in range(12))
    assert all(is_requeued(137, restarts) for restarts in range(12, 22))
    assert is_requeued(75, 22) and not is_requeued(137, 23)
    assert (tmp_path / "train-7.failures").read_text().count("exit code 137\n") == 11


@pytest.mark.quick
def test_ray_s_script_gives_the_workers_the_plan(tmp_path: Path) -> None:
    tree = ast.parse(emitted(tmp_path, "ray", "--gpus", "16", "--gpus-per-node", "8", "--gpu", "h100"))
    (given,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ENVIRONMENT"
    )
    environment = ast.literal_eval(given)
    assert plan_in(environment["MESHWRIGHT_PLAN"])["dp"] == 8
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.quick
def test_a_job_without_a_name_is_refused(tmp_path: Path) -> None:
    """As where the variable of a scheduler is not set."""
    (tmp_path / "train.py").write_text("")
    done = CliRunner().invoke(
        app, ["launch", "--cpu", "--num_processes", "1", "--job_id", "", str(tmp_path / "train.py")]
    )
    assert done.exit_code == 2 and "--job_id is empty; give the scheduler's name" in done.output

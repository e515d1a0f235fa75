"""What ``cluster/`` tells machines to do: valid by the schemas of Ray and KubeRay, and all that it names exists."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from kimi_ray.actors.ray_cluster import STORAGE_RESOURCE
from kimi_ray.cli.app import app
from kimi_ray.config import ENV_PREFIX, RuntimeConfig

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
KUBERAY = CLUSTER / "kuberay"
RAY = Path(next(iter(importlib.util.find_spec("ray").submodule_search_locations)))
DEADLINE = re.compile(r"--deadline (\d+)")
OURS_BEYOND_SETTINGS = {"KIMI_RAY_CLUSTER_DIR", "KIMI_RAY_CONFIG"}
TEXTS = [CLUSTER / "README.md", CLUSTER / "ray-cluster.yaml", *sorted(KUBERAY.glob("*.yaml"))]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def cluster_spec() -> dict[str, Any]:
    return load(KUBERAY / "ray-cluster.yaml")["spec"]


def groups() -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in cluster_spec()["workerGroupSpecs"]}


def containers(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield from group["template"]["spec"]["containers"]


def test_ray_up_takes_its_file() -> None:
    schema = json.loads((RAY / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(load(CLUSTER / "ray-cluster.yaml"), schema)


@pytest.mark.parametrize("name", ["ray-cluster.yaml", "ray-job.yaml"])
def test_kuberay_takes_our_resources(name: str) -> None:
    schema = load(ROOT / "tests" / "fixtures" / "kuberay" / "schema.yaml")
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(load(KUBERAY / name), schema)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda spec: spec.pop("headGroupSpec"),
        lambda spec: spec.update(autOptions={}),
        lambda spec: spec["workerGroupSpecs"][0].pop("groupName"),
        lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
    ],
)
def test_the_schema_refuses_what_kuberay_would(break_it: Any) -> None:
    resource = load(KUBERAY / "ray-cluster.yaml")
    break_it(resource["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(resource, load(ROOT / "tests" / "fixtures" / "kuberay" / "schema.yaml"))


def test_the_job_has_the_same_cluster() -> None:
    assert load(KUBERAY / "ray-job.yaml")["spec"]["rayClusterSpec"] == cluster_spec()


def test_one_pod_keeps_the_home_on_a_volume_that_outlives_it() -> None:
    keepers = {
        name: json.loads(json.loads(group["rayStartParams"]["resources"].strip("'")))
        for name, group in groups().items()
        if "resources" in group["rayStartParams"]
    }
    assert keepers == {"storage": {STORAGE_RESOURCE: 1}}
    group = groups()["storage"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 1
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    home = {one["name"]: one["value"] for one in container["env"]}["KIMI_RAY_HOME"]
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == home]
    (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
    claim = load(KUBERAY / "home.yaml")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert all(
        {e["name"]: e.get("value") for e in c["env"]}["KIMI_RAY_HOME"] == home for c in containers(cluster_spec())
    )


def test_the_head_takes_no_work_and_all_have_the_token() -> None:
    spec = cluster_spec()
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    secret = load(KUBERAY / "secret.yaml")
    assert spec["authOptions"] == {"mode": "token", "secretName": secret["metadata"]["name"]}
    assert set(secret["stringData"]) == {"auth_token"}
    up = load(CLUSTER / "ray-cluster.yaml")
    assert up["available_node_types"]["head"]["resources"]["CPU"] == 0
    keepers = [n for n in up["available_node_types"].values() if STORAGE_RESOURCE in n["resources"]]
    assert [(one["min_workers"], one["max_workers"]) for one in keepers] == [(1, 1)]


def test_pods_are_drained_before_they_go_and_have_the_time_for_it() -> None:
    for group in cluster_spec()["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        for container in pod["containers"]:
            command = " ".join(container["lifecycle"]["preStop"]["exec"]["command"])
            assert "kimi-ray drain here --address auto" in command
            after = {one["name"]: one["value"] for one in container["env"]}["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
            wanted = float(DEADLINE.search(command)[1]) + float(after) + 15  # to connect, and to end
            assert pod["terminationGracePeriodSeconds"] >= max(30, wanted)
    assert cluster_spec()["headGroupSpec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 30


def test_every_variable_is_a_setting_of_ours_or_of_ray() -> None:
    binary = (RAY / "core" / "src" / "ray" / "gcs" / "gcs_server").read_bytes()
    python = "".join(p.read_text() for p in (RAY / "_private").rglob("*.py") if "test" not in p.name)
    for path in [*TEXTS, CLUSTER / "local.sh"]:
        for name in sorted(set(re.findall(r"\bKIMI_RAY_[A-Z_]*[A-Z]\b", path.read_text()))):
            setting = name.removeprefix(ENV_PREFIX).lower()
            inner = path.name == "local.sh" and name == "KIMI_RAY_CLUSTER"
            assert setting in RuntimeConfig.model_fields or name in OURS_BEYOND_SETTINGS or inner, (path, name)
        for name in sorted(set(re.findall(r"\bRAY_[A-Za-z_]*[A-Za-z]\b", path.read_text()))):
            known = name in python or name.encode() in binary or name.removeprefix("RAY_").encode() in binary
            # RAY_HEAD_IP is the autoscaler's own
            assert known or name == "RAY_HEAD_IP" or name == "RAY_USAGE_STATS_ENABLED", (path, name)


def test_every_setting_that_is_named_exists() -> None:
    names = re.findall(r"`?\b([a-z][a-z_]+) = (?:true|false|\d+|\")", (CLUSTER / "README.md").read_text())
    assert "home_shared" in names
    assert set(names) <= set(RuntimeConfig.model_fields)


def commands() -> list[str]:
    """Every call of ``kimi-ray`` in the files, continuation lines joined."""
    found: list[str] = []
    for path in TEXTS:
        text = path.read_text()
        if path.suffix == ".yaml":
            text = "\n".join(_strings(load(path)))
        else:
            text = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) + re.findall(r"`(kimi-ray [^`]+)`", text))
            text = text.replace("\\\n", " ")
        found += re.findall(r"\b(kimi-ray [a-z][^\n;|#)]*)", text)
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(child)


def test_every_command_line_is_one_of_ours() -> None:
    lines = commands()
    assert len(lines) >= 8 and any("drain" in line for line in lines) and any("swarm" in line for line in lines)
    for line in lines:
        words = shlex.split(line.strip().strip("'\""))[1:]
        command: Any = get_command(app)
        while getattr(command, "commands", None) and words:
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        options = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            if word.startswith("-"):
                assert word.partition("=")[0] in options, (line, word)


def test_every_flag_of_ray_start_exists() -> None:
    from ray.scripts.scripts import start

    flags = {flag for parameter in start.params for flag in parameter.opts}
    spec = cluster_spec()
    given = {
        f"--{name}" for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]) for name in group["rayStartParams"]
    }
    up = load(CLUSTER / "ray-cluster.yaml")
    for line in up["head_start_ray_commands"] + up["worker_start_ray_commands"]:
        given |= set(re.findall(r"(--[a-z-]+)", line))
    assert given <= flags, given - flags

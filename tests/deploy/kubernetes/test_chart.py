"""What the chart renders is valid, hangs together, and is what the server and its image are."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from jaxserve.config.engine_config import EngineConfig
from jaxserve.observability.metrics import Metrics
from server.cli import build_parser
from server.commands.several_models import command_lines
from tests.deploy.kubernetes.rendering import (
    CHART,
    KUBERNETES,
    PRESETS,
    needs_helm,
    of_kind,
    preset,
    render,
)
from tests.deploy.kubernetes.schemas.validation import problem, published
from tests.deploy.test_containers import FILES, stages
from tests.deploy.test_monitoring import DASHBOARD, MONITORING
from tests.server.server_process import ROOT

pytestmark = needs_helm

WHOLE: dict[str, Any] = {
    "model": "meta-llama/Meta-Llama-3-8B-Instruct",
    "config": {"metrics-prefix": "vllm", "max-num-seqs": 64, "compilation-cache": "on"},
    "image": {"digest": f"sha256:{'0' * 64}", "pullSecrets": ["registry"]},
    "secrets": {"huggingFace": {"name": "hub"}, "apiKeys": {"name": "keys"}},
    "cache": {"persistent": True, "storageClassName": "shared"},
    "autoscaling": {"enabled": True},
    "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "monitoring": {"serviceMonitor": True, "prometheusRule": True, "dashboard": True},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "labels": {"team": "search"},
    "annotations": {"note": "text"},
    "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "extraVolumes": [{"name": "models", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
}
PROCESSES: dict[str, Any] = {
    "workload": "LeaderWorkerSet",
    "leaderWorkerSet": {"size": 2, "port": 9100},
    "config": {"tensor-parallel-size": 4},
    "secrets": {"processToken": {"name": "processes"}},
}
# What LWS and a cluster tell the container of a worker.
VARIABLES = {
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "chat-jaxserve-group-0.chat-jaxserve-group.models",
    "POD_IP": "fd00::7",
}
CASES = {
    "defaults": {},
    "whole": WHOLE,
    "groups": WHOLE | {"workload": "LeaderWorkerSet"},
    "processes": WHOLE | PROCESSES,
    "bare": {"disruptionBudget": {"enabled": False}, "networkPolicy": {"enabled": False}},
} | {name: preset(name) for name in PRESETS}


def pod_of(objects: list[dict[str, Any]], role: str = "leader") -> dict[str, Any]:
    """The pod template of a release's workload."""
    for one in objects:
        if one["kind"] == "Deployment":
            return one["spec"]["template"]
        if one["kind"] == "LeaderWorkerSet":
            group = one["spec"]["leaderWorkerTemplate"]
            return group.get(f"{role}Template", group["workerTemplate"])
    raise AssertionError("no workload")


def flags(objects: list[dict[str, Any]], folder: Path, role: str = "leader") -> Any:
    """The command line of a release's container, as the server reads it."""
    (container,) = pod_of(objects, role)["spec"]["containers"]
    words = [
        re.sub(r"\$\((\w+)\)", lambda one: VARIABLES[one[1]], one) for one in container["args"]
    ]
    assert words[:3] == ["serve", "--config", "/etc/jaxserve/serve.yaml"]
    file = folder / "serve.yaml"
    file.write_text(of_kind(objects[:], "ConfigMap")["data"]["serve.yaml"])
    return build_parser("serve").parse_args(command_lines([*words[:2], str(file), *words[3:]])[0])


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid_in_strict_mode(case: str) -> None:
    objects = render(CASES[case])
    found = {f"{one['kind']} {one['metadata']['name']}": problem(one) for one in objects}
    assert len(found) == len(objects) and not any(found.values()), found


def test_what_is_published_refuses_what_a_cluster_would() -> None:
    deployment = of_kind(render({}), "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["redinessProbe"] = container.pop("readinessProbe")
    assert "redinessProbe" in str(problem(deployment))
    service = of_kind(render({}), "Service")
    service["spec"]["ports"][0]["port"] = "eighty"
    assert problem(service) == "$.spec.ports[0].port: 'eighty' is not of type 'integer'"
    groups = of_kind(render({"workload": "LeaderWorkerSet"}), "LeaderWorkerSet")
    groups["spec"]["leaderWorkerTemplate"]["sise"] = 1
    assert "sise" in str(problem(groups))
    sources = published()["sources"]
    assert set(sources) == {"kubernetes", "kuberay", "lws", "prometheus-operator"}
    assert all(re.fullmatch(r"v\d+\.\d+\.\d+", version) for version in sources.values())


@pytest.mark.parametrize("case", ["whole", "groups", "processes"])
def test_the_objects_of_a_release_find_each_other(case: str) -> None:
    objects = render(CASES[case])
    pod = pod_of(objects)
    labels = pod["metadata"]["labels"]
    selectors = [
        of_kind(objects, "Service")["spec"]["selector"],
        of_kind(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        of_kind(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"],
    ]
    service, *others = selectors
    leaders = {"leaderworkerset.sigs.k8s.io/worker-index": "0"} if case == "processes" else {}
    assert service == others[0] | leaders, "the other pods of a group have no HTTP"
    selectors = others
    assert all(one == selectors[0] for one in selectors)
    assert selectors[0].items() <= labels.items()
    # the monitor selects the Service by the Service's own labels
    assert selectors[0].items() <= of_kind(objects, "Service")["metadata"]["labels"].items()
    target = of_kind(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert any(
        (one["apiVersion"], one["kind"], one["metadata"]["name"])
        == (target["apiVersion"], target["kind"], target["name"])
        for one in objects
    )
    spec = pod["spec"]
    (container,) = spec["containers"]
    named = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == named
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    for volume in spec["volumes"]:
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in names
        if claim := volume.get("persistentVolumeClaim"):
            assert ("PersistentVolumeClaim", claim["claimName"]) in names
    assert ("ServiceAccount", spec["serviceAccountName"]) in names
    (port,) = container["ports"]
    probes = [container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness")]
    assert {*probes, of_kind(objects, "Service")["spec"]["ports"][0]["targetPort"]} == {
        port["name"]
    }


def test_a_pod_has_few_rights_and_time_to_begin_and_to_end() -> None:
    pod = pod_of(render({"drain": {"preStopSeconds": 7, "shutdownTimeoutSeconds": 90}}))["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert pod["terminationGracePeriodSeconds"] > 7 + 90 + 8  # EXIT_S of the server
    start = container["startupProbe"]
    assert start["failureThreshold"] * start["periodSeconds"] == 1800


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_pod_runs_the_image_as_its_dockerfile_made_it(file: Path) -> None:
    _, final = stages(file)
    image = dict(final)
    pod = pod_of(render({}))["spec"]
    user, group = (int(one) for one in image["USER"].split(":"))
    context = pod["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["cache"] == image["VOLUME"] and mounts["tmp"] == "/tmp"
    assert container["ports"][0]["containerPort"] == int(image["EXPOSE"])
    assert "command" not in container  # the entry point is the image's


@pytest.mark.parametrize("case", PRESETS)
def test_the_server_takes_the_flags_of_a_preset(case: str, tmp_path: Path) -> None:
    given = {"drain": {"shutdownTimeoutSeconds": 45}, "port": 8123, "model": "owner/name"}
    found = flags(render(preset(case) | given), tmp_path)
    assert (found.host, found.port, found.shutdown_timeout) == ("0.0.0.0", 8123, 45.0)
    assert found.default_model == "owner/name"
    wanted = preset(case).get("config", {}).get("tensor-parallel-size")
    assert found.tensor_parallel_size == (
        wanted or build_parser("serve").parse_args(["serve"]).tensor_parallel_size
    )


def test_the_pods_of_a_group_are_the_processes_of_an_engine(tmp_path: Path) -> None:
    objects = render(PROCESSES)
    group = of_kind(objects, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    found = {role: flags(objects, tmp_path, role) for role in ("leader", "worker")}
    address = VARIABLES["LWS_LEADER_ADDRESS"]
    assert found["leader"].coordinator == "[fd00::7]:9100", "its own address"
    assert found["worker"].coordinator == f"{address}:9100" and address.startswith(
        of_kind(objects, "LeaderWorkerSet")["metadata"]["name"]
    )
    for role, one in found.items():
        assert one.num_processes == group["size"] == 2 and one.process_id == 1
        config = EngineConfig(
            model="m",
            **{name: getattr(one, name) for name in ("tensor_parallel_size", "process_token_file")},
            **{name: getattr(one, name) for name in ("num_processes", "process_id", "coordinator")},
        )
        assert config.process_id == 1, "its settings are allowed"
        pod = pod_of(objects, role)["spec"]
        (mount,) = [
            mount for mount in pod["containers"][0]["volumeMounts"] if "process" in mount["name"]
        ]
        (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
        assert volume["secret"]["secretName"] == "processes"
        assert f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}" == str(
            config.process_token_file
        )
    (worker,) = pod_of(objects, "worker")["spec"]["containers"]
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & set(worker)
    # it is there until the leader, which needs it, has drained
    pods = [pod_of(objects, role)["spec"] for role in ("leader", "worker")]
    waits = [
        int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1]) for pod in pods
    ]
    assert waits[0] + 30 < waits[1] < pods[1]["terminationGracePeriodSeconds"]
    own = of_kind(objects, "NetworkPolicy")["spec"]
    within = {"podSelector": own["podSelector"]}
    assert {"from": [within]} in own["ingress"] and {"to": [within]} in own["egress"]
    # LWS names the Service of the pods' names as the group
    assert of_kind(objects, "Service")["metadata"]["name"] not in address.split(".")


def test_keys_are_read_where_they_are_mounted(tmp_path: Path) -> None:
    objects = render({"secrets": {"apiKeys": {"name": "keys", "key": "all"}}})
    pod = pod_of(objects)["spec"]
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    (volume,) = [one for one in pod["volumes"] if one["name"] == "api-keys"]
    assert volume["secret"]["items"] == [{"key": "all", "path": "keys.yaml"}]
    assert flags(objects, tmp_path).api_keys_file == f"{mounts['api-keys']}/keys.yaml"


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1)])
def test_an_update_needs_room_for_another_pod_or_does_without(surge: int, unavailable: int) -> None:
    values = {"maxSurge": surge}
    deployment = of_kind(render(values), "Deployment")
    groups = of_kind(render(PROCESSES | values), "LeaderWorkerSet")
    wanted = {"maxSurge": surge, "maxUnavailable": unavailable}
    assert deployment["spec"]["strategy"]["rollingUpdate"] == wanted
    assert groups["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] == wanted


def test_another_flag_makes_another_pod() -> None:
    sums = {
        pod_of(render({"config": config}))["metadata"]["annotations"]["checksum/config"]
        for config in ({}, {"max-num-seqs": 8}, {"max-num-seqs": 16})
    }
    assert len(sums) == 3


@pytest.mark.parametrize("prefix", ["jaxserve", "vllm"])
def test_the_autoscaler_asks_for_what_the_adapter_makes_of_our_metrics(prefix: str) -> None:
    """Prometheus' regular expressions are Go's, which agree with Python's on these."""
    rules = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    text = generate_latest(Metrics("tiny", prefix).registry).decode()
    gauges = re.findall(r"^# TYPE (\S+) gauge$", text, flags=re.MULTILINE)
    provided = {
        re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), gauge): rule
        for rule in rules
        for series in re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
        for gauge in gauges
        if re.search(series, gauge)
    }
    scaler = of_kind(
        render({"autoscaling": {"enabled": True, "kvCacheUsage": 0.75, "waitingRequests": 3}}),
        "HorizontalPodAutoscaler",
    )
    asked = {
        one["pods"]["metric"]["name"]: one["pods"]["target"] for one in scaler["spec"]["metrics"]
    }
    assert set(asked) == set(provided)
    # a pod has a series for each of its data-parallel engines
    assert provided["jaxserve_num_requests_waiting"]["metricsQuery"].startswith("sum by")
    assert provided["jaxserve_kv_cache_usage_perc"]["metricsQuery"].startswith("avg by")
    assert asked["jaxserve_num_requests_waiting"]["averageValue"] == "3"
    assert asked["jaxserve_kv_cache_usage_perc"]["averageValue"] == "750m"
    # the autoscaler alone says how many there are
    deployment = of_kind(render({"autoscaling": {"enabled": True}}), "Deployment")
    assert "replicas" not in deployment["spec"]


@pytest.mark.parametrize("prefix", ["jaxserve", "vllm"])
def test_rules_and_dashboard_are_the_files_of_monitoring(prefix: str) -> None:
    values = WHOLE | {"config": {"metrics-prefix": prefix}}
    objects = render(values)
    rules = yaml.safe_load(
        (MONITORING / "alerts.yml").read_text().replace("jaxserve:", f"{prefix}:")
    )
    assert of_kind(objects, "PrometheusRule")["spec"] == rules
    (shown,) = [
        one["data"]["jaxserve.json"] for one in objects if "jaxserve.json" in one.get("data", {})
    ]
    dashboard = DASHBOARD.read_text().replace("jaxserve:", f"{prefix}:")
    assert json.loads(shown) == json.loads(dashboard)
    # rules look for this job, and back ten seconds
    (endpoint,) = of_kind(objects, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "vllm"}]
    assert int(endpoint["interval"].removesuffix("s")) <= 5


def test_the_chart_holds_no_copies() -> None:
    files = {file.name: file.resolve() for file in (CHART / "files").iterdir()}
    assert files == {"alerts.yml": MONITORING / "alerts.yml", "dashboard.json": DASHBOARD}
    assert all((CHART / "files" / name).is_symlink() for name in files)


REFUSED = [
    ({"replicas": "two"}, "'/replicas': got string, want integer"),
    ({"replica": 2}, "additional properties 'replica' not allowed"),
    ({"maxSurge": "25%"}, "'/maxSurge': got string, want integer"),
    ({"model": 7}, "'/model': got number, want string"),
    ({"image": {"tag": 1.2}}, "'/image/tag': got number, want string"),
    ({"service": {"port": "80"}}, "'/service/port': got string, want integer"),
    ({"port": 80}, "'/port': minimum: got 80, want 1,024"),
    ({"config": ["--max-num-seqs"]}, "'/config': got array, want object"),
    ({"config": {"max_num_seqs": 4}}, "'max_num_seqs' does not match pattern"),
    ({"resources": {"limits": {"memory": "8 GB"}}}, "'8 GB' does not match pattern"),
    ({"autoscaling": {"kvCacheUsage": 80}}, "'/autoscaling/kvCacheUsage': maximum: got 80, want 1"),
    ({"workload": "Pod"}, "'/workload': value must be one of 'Deployment', 'LeaderWorkerSet'"),
    ({"config": {"port": 1}}, "config.port: the chart sets it, from a value of its own"),
    ({"config": {"uds": "/tmp/one"}}, "config.uds: the probes"),
    ({"config": {"allowed-hosts": ["a"]}}, "config.allowed-hosts: the probes"),
    ({"config": {"ssl-certfile": "a"}}, "config.ssl-certfile: the probes"),
    (
        {"autoscaling": {"enabled": True, "minReplicas": 5}},
        "autoscaling.minReplicas: 5 is more than maxReplicas, 4",
    ),
    (
        PROCESSES | {"config": {"tensor-parallel-size": 3}},
        "config.tensor-parallel-size: 3 is no multiple of leaderWorkerSet.size, 2 pods",
    ),
    (PROCESSES | {"port": 9100}, "leaderWorkerSet.port: 9100 is the port of HTTP"),
    (PROCESSES | {"config": {"coordinator": "a:1"}}, "config.coordinator: the chart sets it"),
    (
        PROCESSES | {"secrets": {}},
        "secrets.processToken.name: empty, but the 2 pods of a group know each other by a secret",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=lambda one: str(one)[:40])
def test_a_wrong_value_is_refused_by_its_name(values: dict[str, Any], message: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError, match=re.escape(message)):
        render(values)


def test_rules_of_egress_are_added() -> None:
    rule = {"ports": [{"protocol": "TCP", "port": 4317}]}
    added = of_kind(render({"model": "m", "networkPolicy": {"egress": [rule]}}), "NetworkPolicy")
    assert added["spec"]["egress"][2:] == [rule] and problem(added) is None


def test_helm_lints_the_chart() -> None:
    import helm_python

    found = helm_python.lint(str(CHART), strict=True)
    told = [one["error"] for one in found["messages"]]
    assert not found["errors"] and told == ["icon is recommended"]


def commands() -> list[list[str]]:
    """The helm commands of the page that install our chart."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    found = re.findall(r"^helm install .*$", text, flags=re.MULTILINE)
    return [words for words in map(shlex.split, found) if (ROOT / words[3]).is_dir()]


def test_the_commands_of_the_page_render() -> None:
    assert len(commands()) == 3
    for words in commands():
        given = list(itertools.pairwise(words))
        values: dict[str, Any] = {}
        for file in [word for flag, word in given if flag == "-f"]:
            values |= yaml.safe_load((ROOT / file).read_text())
        for setting in [word for flag, word in given if flag == "--set"]:
            path, _, value = setting.partition("=")
            *above, last = path.split(".")
            into = values
            for name in above:
                into = into.setdefault(name, {})
            into[last] = value
        assert not any(problem(one) for one in render(values, release=words[2]))

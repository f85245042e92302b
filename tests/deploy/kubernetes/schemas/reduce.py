"""Makes `schemas.json`: the published schemas of the kinds that the manifests use, and no others.

    python -m tests.deploy.kubernetes.schemas.reduce KUBERNETES CRD... > schemas.json

KUBERNETES is a folder of the package kubernetes-validate, such as
kubernetes-json-schema/v1.37.0-local-strict. CRD is NAME@VERSION=FILE, a CustomResourceDefinition as
its project publishes it. Descriptions are left out, unknown fields are refused as a cluster's API
does in strict mode, and a pod template inside a CRD is Kubernetes' own.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

KINDS = {
    "v1": ("ConfigMap", "PersistentVolumeClaim", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
}
METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
KEPT = ("type", "properties", "required", "enum", "pattern", "items", "additionalProperties")
KEPT += ("minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength", "format", "$ref")
KEPT += ("oneOf", "anyOf", "allOf", "not")


def reduced(schema: Any) -> Any:
    """A schema without what says nothing of a value."""
    if isinstance(schema, list):
        return [reduced(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: reduced(one) for name, one in value.items()}
        elif key in KEPT:
            found[key] = reduced(value)
    if isinstance(kinds := found.get("type"), list):  # the package lets everything be null
        named = [kind for kind in kinds if kind != "null"]
        found["type"] = named[0] if len(named) == 1 else named
    return found


def strict(schema: Any) -> Any:
    """A schema of a CRD as JSON Schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties", {})
    if {"containers"} <= set(properties.get("spec", {}).get("properties", {})):
        return {"$ref": f"#/$defs/{POD_TEMPLATE}"}
    found = {name: strict(value) for name, value in schema.items() if name != "properties"}
    if properties:
        found["properties"] = {name: strict(value) for name, value in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        found = {"type": ["integer", "string"]}
    return found


def of_kubernetes(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Where each kind is defined, and the definitions."""
    all_of_them = json.loads((folder / "_definitions.json").read_text())["$defs"]
    kinds = {}
    for version, names in KINDS.items():
        for name, schema in all_of_them.items():
            for one in schema.get("x-kubernetes-group-version-kind", []):
                group = f"{one['group']}/{one['version']}" if one["group"] else one["version"]
                if group == version and one["kind"] in names:
                    kinds[f"{version}/{one['kind']}"] = name
    return kinds, {name: reduced(schema) for name, schema in all_of_them.items()}


def of_crd(file: Path) -> tuple[str, dict[str, Any]]:
    """The kind of a CRD with its version, and its schema."""
    spec = yaml.safe_load(file.read_text())["spec"]
    (version,) = [one for one in spec["versions"] if one["storage"]]
    schema = reduced(strict(version["schema"]["openAPIV3Schema"]))
    schema["properties"]["metadata"] = {"$ref": f"#/$defs/{METADATA}"}
    schema["properties"].pop("status", None)
    return f"{spec['group']}/{version['name']}/{spec['names']['kind']}", schema


def reachable(definitions: dict[str, Any], roots: list[Any]) -> dict[str, Any]:
    """The definitions that schemas need."""
    found: dict[str, Any] = {}
    left = list(roots)
    while left:
        for name in re.findall(r'"#/\$defs/([^"]+)"', json.dumps(left.pop())):
            if name not in found:
                found[name] = definitions[name]
                left.append(definitions[name])
    return dict(sorted(found.items()))


def main(folder: str, *crds: str) -> None:
    kinds, definitions = of_kubernetes(Path(folder))
    sources = {"kubernetes": Path(folder).name.partition("-")[0]}
    for crd in crds:
        named, _, file = crd.partition("=")
        name, _, version = named.partition("@")
        kind, schema = of_crd(Path(file))
        sources[name] = version
        kinds[kind] = kind.rpartition("/")[2]
        definitions[kinds[kind]] = schema
    roots = [{"$ref": f"#/$defs/{name}"} for name in kinds.values()]
    whole = {"sources": sources, "kinds": kinds, "$defs": reachable(definitions, roots)}
    print(json.dumps(whole, separators=(",", ":")))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`GET /openapi.json`, and the same document as a page: `GET /docs`."""

from __future__ import annotations

from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from server.openapi import document

STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "code{background:#eee}table{border-collapse:collapse}td,th{border:1px solid #ccc;"
    "padding:2px 8px;text-align:left;vertical-align:top}"
)


async def openapi(request: Request) -> Response:
    """The OpenAPI document of this server."""
    return JSONResponse(document(request.app.routes))


async def docs(request: Request) -> Response:
    """The same for people: one page that needs nothing else."""
    return HTMLResponse(
        page(document(request.app.routes)),
        headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
    )


def page(described: dict[str, Any]) -> str:
    """The page of a document."""
    schemas = described["components"]["schemas"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>jaxserve</title>",
        f"<style>{STYLE}</style><h1>jaxserve {escape(described['info']['version'])}</h1>",
        "<p>Made from <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for path, methods in described["paths"].items():
        for method, told in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(told['summary'])}</p>")
            body = told.get("requestBody", {}).get("content", {}).get("application/json", {})
            schema = body.get("schema", {})
            for one in schema.get("anyOf", [schema]):
                name = one.get("$ref", "").rpartition("/")[2]
                if name:
                    parts.append(_fields(name, schemas[name]))
    return "".join(parts)


def _fields(name: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code>{' (needed)' if field in needed else ''}</td>"
        f"<td>{escape(_kind(kind))}</td></tr>"
        for field, kind in schema["properties"].items()
    )
    return f"<h3>{escape(name)}</h3><table><tr><th>field</th><th>type</th></tr>{rows}</table>"


def _kind(schema: dict[str, Any]) -> str:
    """A type in words."""
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return ", ".join(map(repr, schema.get("enum", [schema.get("const")])))
    if "$ref" in schema:
        name: str = schema["$ref"].rpartition("/")[2]
        return name
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


ROUTES = [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]

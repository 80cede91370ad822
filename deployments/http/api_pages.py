"""The interface's documentation at /docs: Swagger UI, out of the package `fastapi-offline`. An operator's key is typed in at this origin,
so no part of the page comes from elsewhere, and its policy is the playground's.
"""

from collections.abc import Mapping
from importlib.resources import files

from fastapi import APIRouter

from deployments.http.static_files import StaticFile, giver_of, static_file

_OURS, _SWAGGER = files("deployments.http").joinpath("api_pages"), files("fastapi_offline").joinpath("static")
FILES: Mapping[str, StaticFile] = {
    "/docs": static_file(_OURS.joinpath("docs.html")),
    "/docs/start.js": static_file(_OURS.joinpath("start.js")),
    "/docs/swagger-ui.css": static_file(_SWAGGER.joinpath("swagger-ui.css")),
    "/docs/swagger-ui-bundle.js": static_file(_SWAGGER.joinpath("swagger-ui-bundle.js")),
}
PATHS = frozenset(FILES)
"""Paths open to all: the documentation holds no data."""


def documentation_routes() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    for path, file in FILES.items():
        routes.add_api_route(path, giver_of(file))
    return routes

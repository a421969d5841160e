"""The table of routes: what each requires of callers, its error form, and its part of the OpenAPI document.

A class that answers requests declares a route above each method, by `serves`; guards, errors and the document follow from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halfserve.serve.http.routing.error_forms import ErrorForm
from halfserve.serve.http.routing.operations import RestOperation
from halfserve.serve.protocol.rpc import Access

MODEL: Final = "/v2/models/{model}"
VERSION: Final = MODEL + "/versions/{version}"
DECLARED: Final = "rest_routes"  # the attribute of a method that has its RestRoutes

Endpoint = Callable[[Request], Awaitable[Response]]
Handler = TypeVar("Handler", bound=Callable[[Any, Request], Awaitable[Response]])


@dataclass(frozen=True)
class RestRoute:
    """One row of the table.

    Attributes:
        method: HTTP method. HEAD is served where GET is.
        path: path, with the names of parameters in braces; a parameter has no slash.
        access: requirements, which all routes of a path share.
        operation: its part of the OpenAPI document; None for the page and its files, which are not for programs.
        form: form of errors, which all routes of a path share.
        checks_token: whether the endpoint checks the token itself once the body has arrived.
    """

    method: str
    path: str
    access: Access
    operation: RestOperation | None = None
    form: ErrorForm = ErrorForm.OURS
    checks_token: bool = False


def serves(
    method: str,
    path: str,
    access: Access,
    operation: RestOperation | None = None,
    *,
    form: ErrorForm = ErrorForm.OURS,
    checks_token: bool = False,
) -> Callable[[Handler], Handler]:
    """Declare a RestRoute that the method below answers."""
    return _declare(RestRoute(method, path, access, operation, form, checks_token))


def serves_versions(
    method: str, end: str, access: Access, operation: RestOperation, *, checks_token: bool = False
) -> Callable[[Handler], Handler]:
    """Declare the routes of a model and of one of its versions; `{model}` in the summary stands for either.

    Args:
        method: HTTP method.
        end: end of the path, behind the model or the version.
        access: requirements.
        operation: operation of the model's path; the name for the version's path ends in OfVersion.
        checks_token: see RestRoute.
    """
    latest = replace(operation, summary=operation.summary.format(model="the latest version of a model"))
    of_version = replace(
        operation, name=f"{operation.name}OfVersion", summary=operation.summary.format(model="one version of a model")
    )
    return _declare(
        RestRoute(method, MODEL + end, access, latest, checks_token=checks_token),
        RestRoute(method, VERSION + end, access, of_version, checks_token=checks_token),
    )


def _declare(*routes: RestRoute) -> Callable[[Handler], Handler]:
    def declared(handler: Handler) -> Handler:
        setattr(handler, DECLARED, [*routes, *getattr(handler, DECLARED, ())])
        return handler

    return declared


class GuardedRoute(Route):
    """A route of the table, with what answers it."""

    def __init__(self, declared: RestRoute, endpoint: Endpoint) -> None:
        super().__init__(declared.path, endpoint, methods=[declared.method])
        self.declared = declared

    @property
    def access(self) -> Access:
        return self.declared.access

    @property
    def served_methods(self) -> list[str]:
        return sorted(self.methods or ())


def routes_of(*answering: object) -> list[GuardedRoute]:
    """Return the routes that the classes of these objects declare, answered by the objects."""
    return [GuardedRoute(route, getattr(one, name)) for one in answering for name, route in _declared(type(one))]


def declared_by(*answering: object) -> list[RestRoute]:
    """Return the rows of the table that the classes of these objects declare."""
    return [route for one in answering for _, route in _declared(type(one))]


def _declared(of: type) -> Iterator[tuple[str, RestRoute]]:
    """Routes of a class in the order of its source, with the name of the method that answers."""
    for name, member in vars(of).items():
        for route in getattr(member, DECLARED, ()):
            yield name, route


class ServedPath:
    """The routes of one path, by method."""

    def __init__(self, first: GuardedRoute) -> None:
        """Start with one route, which says what all of them require, and the form of their errors."""
        self.path, self.access, self.form = first.path, first.access, first.declared.form
        self.routes: dict[str, GuardedRoute] = {}
        self._regex = first.path_regex

    def add(self, route: GuardedRoute) -> None:
        """Add the route of another method.

        Raises:
            ValueError: the path has one for this method, or routes that require something else or have another error form.
        """
        if route.access != self.access:
            raise ValueError(f"the routes of {self.path} require different things: {self.access} and {route.access}")
        if route.declared.form is not self.form:
            raise ValueError(
                f"the routes of {self.path} have the error forms {self.form} and {route.declared.form}, expected one form"
            )
        for method in route.served_methods:
            if self.routes.setdefault(method, route) is not route:
                raise ValueError(f"{method} {self.path} has two routes, expected one")

    def parameters(self, path: str) -> dict[str, str] | None:
        """Return the values of the parameters in a request's path; None if the path is another one."""
        match = self._regex.fullmatch(path)
        return None if match is None else match.groupdict()


class RouteTable:
    """Everything that one port serves."""

    def __init__(self, routes: Iterable[GuardedRoute]) -> None:
        """Sort the routes by path.

        Raises:
            ValueError: two routes do not go together; see `ServedPath.add`.
        """
        self.paths: dict[str, ServedPath] = {}
        for route in routes:
            if route.path not in self.paths:
                self.paths[route.path] = ServedPath(route)
            self.paths[route.path].add(route)
        self._patterns = [served for served in self.paths.values() if "{" in served.path]
        self._literal = {served.path: served for served in self.paths.values() if "{" not in served.path}

    def find(self, path: str) -> tuple[ServedPath | None, dict[str, str]]:
        """Return what is served at a request's path, and the values of its parameters. Paths without parameters come first."""
        literal = self._literal.get(path)
        if literal is not None:
            return literal, {}
        for pattern in self._patterns:
            parameters = pattern.parameters(path)
            if parameters is not None:
                return pattern, parameters
        return None, {}

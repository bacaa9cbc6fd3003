"""The public surface of the client: two clients with one surface, and a sentence for everything in it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import quire.client
from quire.client import AsyncClient, Client, Delivery, StoreSession, SyncDelivery, SyncStoreSession

# What adapters build on: it belongs to the loop, and has no blocking form.
OF_THE_LOOP = {
    *("transport", "gateway", "timeout_s", "abandon", "abandoned", "place", "nothing_comes"),
    *("connect", "start", "unwatch", "on_message", "buffer"),
}


def _public(kind: type) -> dict[str, Any]:
    members = {name: getattr(kind, name) for name in dir(kind)}
    return {name: member for name, member in members.items() if not name.startswith("_")}


@pytest.mark.parametrize(
    ("one", "other"), [(AsyncClient, Client), (Delivery, SyncDelivery), (StoreSession, SyncStoreSession)]
)
def test_what_one_client_has_the_other_has(one: type, other: type) -> None:
    for name, method in _public(one).items():
        if name in OF_THE_LOOP:
            continue
        assert name in _public(other), f"{other.__name__} has no {name}"
        if callable(method):
            mine, its = (list(inspect.signature(_public(kind)[name]).parameters.values()) for kind in (one, other))
            assert [(each.name, each.kind, each.default) for each in mine] == [
                (each.name, each.kind, each.default) for each in its
            ], name


@pytest.mark.parametrize("name", quire.client.__all__)
def test_everything_public_is_documented(name: str) -> None:
    kind = getattr(quire.client, name)
    assert inspect.getdoc(kind), name
    for method, each in _public(kind).items():
        if callable(each) or isinstance(each, property | classmethod):
            assert inspect.getdoc(each), f"{name}.{method} has no docstring"

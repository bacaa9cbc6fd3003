"""Runs ceph/s3-tests against a local cluster, and compares with the list of tests that pass.

    python -m tests.ceph.run CHECKOUT PYTHON [-k EXPRESSION]

CHECKOUT is a clone of the repository, PYTHON an interpreter with its requirements. Tests of operations that Quire does
not implement fail by design (501). The exit status is 1 if a test of `passing.txt` fails; `--write` renews that list.
"""

from __future__ import annotations

import argparse
import asyncio
import configparser
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from quire_server.redis import AccessKeys, connect
from quire_tools.local import LocalCluster

_PASSING = Path(__file__).with_name("passing.txt")
_SECTIONS = {"s3 main": "alice", "s3 alt": "bob", "s3 tenant": "carol", "iam": "dave", "iam root": "erin"}
_SECTIONS["iam alt root"] = "frank"
_WEB_IDENTITY = ("token", "aud", "thumbprint", "JWKS_endpoint", "KC_REALM", "sub", "azp", "user_token", "x5c")
_MODULES = ("s3tests/functional/test_s3.py", "s3tests/functional/test_headers.py")
# Lifecycles that expire in seconds, and logs that Ceph's daemon writes: they wait, and then fail.
_NOT_HERE = "not lifecycle_expiration and not lifecyclev2_expiration and not lifecycle_noncur and not logging"


async def _keys(cluster: LocalCluster) -> dict[str, tuple[str, str]]:
    """Return an access key and its secret for each tenant."""
    redis = connect(cluster.redis_url)
    keys = AccessKeys(redis, cluster.secret.encode())
    created = {tenant: await keys.create(tenant, ()) for tenant in _SECTIONS.values()}
    await redis.aclose()
    return {tenant: (key.name, keys.secret(key)) for tenant, key in created.items()}


def _configuration(cluster: LocalCluster) -> configparser.RawConfigParser:
    """Return the configuration that s3-tests read: an endpoint, and users that are tenants here."""
    host, _, port = cluster.s3_address.rpartition(":")
    parser = configparser.RawConfigParser()
    parser["DEFAULT"] = {"host": host, "port": port, "is_secure": "False", "ssl_verify": "False"}
    prefixes = {"bucket prefix": "q-{random}-", "iam name prefix": "q-", "iam path prefix": "/q/"}
    parser["fixtures"] = prefixes
    keys = asyncio.run(_keys(cluster))
    for section, tenant in _SECTIONS.items():
        access_key, secret_key = keys[tenant]
        parser[section] = {
            "display_name": tenant,
            "user_id": tenant,
            "email": f"{tenant}@example.org",
            "tenant": tenant,
            "api_name": "",
            "access_key": access_key,
            "secret_key": secret_key,
        }
    parser["webidentity"] = dict.fromkeys(_WEB_IDENTITY, "none")
    return parser


def main() -> int:
    """Run the tests, print their outcomes, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("python", type=Path)
    parser.add_argument("-k", default=_NOT_HERE, help="pytest's expression")
    parser.add_argument("--write", action="store_true", help="renew the list of tests that pass")
    arguments = parser.parse_args()
    if arguments.write and arguments.k != _NOT_HERE:
        parser.error("--write renews the whole list: without -k")
    with tempfile.TemporaryDirectory() as folder:
        settings = {"QUIRE_GATEWAY_S3_ENCRYPTED": "1"}
        with LocalCluster(Path(folder), arena_bytes=256 << 20, drive_bytes=512 << 20, settings=settings) as cluster:
            configuration = Path(folder, "s3tests.conf")
            with configuration.open("w") as file:
                _configuration(cluster).write(file)
            outcomes = _outcomes(arguments.checkout, arguments.python.absolute(), configuration, arguments.k)
    passed = sorted(name for name, outcome in outcomes.items() if outcome == "PASSED")
    counts = Counter(outcomes.values())
    print(", ".join(f"{count} {outcome.lower()}" for outcome, count in counts.most_common()))
    if arguments.write:
        _PASSING.write_text("".join(f"{name}\n" for name in passed))
    expected = set(_PASSING.read_text().split())
    if arguments.k != _NOT_HERE:  # a selection: only those that ran
        expected &= outcomes.keys()
    broken = sorted(expected - set(passed))
    for name in broken:
        print(f"passed before, and now: {outcomes.get(name, 'did not run').lower()}: {name}")
    print(f"{len(expected) - len(broken)} of the {len(expected)} listed passed")
    return int(bool(broken) or not passed)


def _outcomes(checkout: Path, python: Path, configuration: Path, expression: str) -> dict[str, str]:
    """Run pytest, with its progress on the terminal; return each test's outcome."""
    command = [str(python), "-m", "pytest", "-q", "-rA", "--tb=no", "-n", "2", "--timeout", "120", "-k", expression]
    environment = os.environ | {"S3TEST_CONF": str(configuration)}
    lines = []
    with subprocess.Popen(
        [*command, *_MODULES], cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if not re.match(r"PASSED|FAILED|SKIPPED|ERROR", line):
                print(line, end="", flush=True)
    matches = (re.match(r"(PASSED|FAILED|ERROR) \S+::(\S+)", line) for line in lines)
    return {match[2]: match[1] for match in matches if match is not None}


if __name__ == "__main__":
    sys.exit(main())

"""Documents that set something of a bucket or an object: tags, CORS rules, lifecycle rules."""

from __future__ import annotations

from dataclasses import replace
from xml.etree.ElementTree import fromstring

import pytest

from quire.model.buckets import StoredObject
from quire_gateway.core.s3_errors import S3Error
from quire_gateway.s3.cors import allowing, read_cors
from quire_gateway.s3.lifecycle import _expired, read_lifecycle
from quire_gateway.s3.tagging import read_tagging, tagging_document, tags_of_header

DAY_S = 86_400.0


def _tagging(*pairs: tuple[str, str]) -> bytes:
    tags = "".join(f"<Tag><Key>{key}</Key><Value>{value}</Value></Tag>" for key, value in pairs)
    return f"<Tagging><TagSet>{tags}</TagSet></Tagging>".encode()


def test_tags_go_round() -> None:
    tags = {"colour": "red & blue", "empty": "", "ключ": "значение"}
    assert read_tagging(tagging_document(tags), 10) == tags
    assert tags_of_header("colour=red%20%26+blue&empty=&b=") == {"colour": "red & blue", "empty": "", "b": ""}
    assert tags_of_header("") == {} and tags_of_header("a=b&c") == {"a": "b", "c": ""}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (_tagging(*((str(number), "") for number in range(11))), "InvalidTag"),
        (_tagging(("k" * 129, "v")), "InvalidTag"),
        (_tagging(("k", "v" * 257)), "InvalidTag"),
        (_tagging(("", "v")), "InvalidTag"),
        (_tagging(("aws:k", "v")), "InvalidTag"),
        (_tagging(("k", "v"), ("k", "w")), "InvalidTag"),
        (b"<Tagging><TagSet><Tag><Key>k</Key></Tag></TagSet></Tagging>", "MalformedXML"),
        (b"<Tagging><TagSet><Tag><Colour/></Tag></TagSet></Tagging>", "NotImplemented"),
        (b"<Tagging>", "MalformedXML"),
        (b"", "MalformedXML"),
    ],
)
def test_tags_that_cannot_be_are_refused(body: bytes, code: str) -> None:
    with pytest.raises(S3Error) as refused:
        read_tagging(body, 10)
    assert refused.value.code == code


@pytest.mark.parametrize("header", ["a=%ff", "a=1&a=2", "=1", "&".join(f"{number}=" for number in range(11))])
def test_a_header_of_tags_that_cannot_be_is_refused(header: str) -> None:
    with pytest.raises(S3Error):
        tags_of_header(header)


def _cors(*rules: str) -> bytes:
    return (
        f"<CORSConfiguration>{''.join(f'<CORSRule>{rule}</CORSRule>' for rule in rules)}</CORSConfiguration>".encode()
    )


_METHOD = "<AllowedMethod>GET</AllowedMethod>"


@pytest.mark.parametrize(
    ("pattern", "origin", "allowed"),
    [
        ("*", "https://a.example", True),
        ("https://*.example", "https://a.example", True),
        ("https://*.example", "https://.example", True),
        ("https://*.example", "https://a.example.net", False),
        ("https://a.example", "http://a.example", False),
        ("https://aa*aa", "https://aaa", False),
    ],
)
def test_origins_are_patterns(pattern: str, origin: str, allowed: bool) -> None:
    rules, document = read_cors(_cors(f"<AllowedOrigin>{pattern}</AllowedOrigin>{_METHOD}"))
    assert (allowing(rules, origin, "GET") is not None) == allowed
    assert allowing(rules, origin, "PUT") is None
    assert allowing(rules, origin, "GET", ["x-amz-date"]) is None, "no header is allowed"
    assert read_cors(document)[0] == rules, "what is kept has the same rules"


def test_the_first_rule_that_fits_answers() -> None:
    rules, _ = read_cors(
        _cors(
            "<AllowedOrigin>https://a.example</AllowedOrigin><AllowedMethod>PUT</AllowedMethod>"
            "<AllowedHeader>x-amz-*</AllowedHeader><ExposeHeader>ETag</ExposeHeader><MaxAgeSeconds>60</MaxAgeSeconds>",
            f"<AllowedOrigin>*</AllowedOrigin>{_METHOD}",
        )
    )
    put = allowing(rules, "https://a.example", "PUT", ["x-amz-meta-colour"])
    assert put is not None
    answer = put.answer("https://a.example")
    assert answer["Access-Control-Allow-Origin"] == "https://a.example"
    assert (answer["Access-Control-Expose-Headers"], answer["Access-Control-Max-Age"]) == ("ETag", "60")
    anyone = allowing(rules, "https://b.example", "GET")
    assert anyone is not None and anyone.answer("https://b.example")["Access-Control-Allow-Origin"] == "*"
    assert "Access-Control-Allow-Credentials" not in anyone.answer("https://b.example")


@pytest.mark.parametrize(
    "rule",
    [
        "",
        _METHOD,
        "<AllowedOrigin>*</AllowedOrigin>",
        "<AllowedOrigin>*</AllowedOrigin><AllowedMethod>PATCH</AllowedMethod>",
        f"<AllowedOrigin>*.*</AllowedOrigin>{_METHOD}",
        f"<AllowedOrigin>*</AllowedOrigin>{_METHOD}<MaxAgeSeconds>soon</MaxAgeSeconds>",
        f"<AllowedOrigin>*</AllowedOrigin>{_METHOD}<Colour>red</Colour>",
        f"<AllowedOrigin>*</AllowedOrigin>{_METHOD}<ExposeHeader>a&#9;b</ExposeHeader>",
    ],
)
def test_rules_that_cannot_be_are_refused(rule: str) -> None:
    with pytest.raises(S3Error):
        read_cors(_cors(rule))


def _lifecycle(*rules: str) -> bytes:
    inner = "".join(f"<Rule>{rule}</Rule>" for rule in rules)
    return f"<LifecycleConfiguration>{inner}</LifecycleConfiguration>".encode()


def _rule(actions: str, chosen: str = "<Filter/>", status: str = "Enabled") -> str:
    return f"{chosen}<Status>{status}</Status>{actions}"


_DAYS = "<Expiration><Days>2</Days></Expiration>"
_ABORT = "<AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload>"
_LONE = "<Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>"
_OBJECT = StoredObject("logs/1", "e", size=10, modified_s=DAY_S * 100 + 3600, blobs=())


def _ends(document: bytes, versions: list[StoredObject], now_s: float) -> list[str]:
    rules, stored = read_lifecycle(document)
    assert read_lifecycle(stored)[0] == rules, "what is kept has the same rules"
    return [version.version_id for version, _ in _expired(versions, rules, now_s)]


def test_an_age_ends_at_the_midnight_after_it() -> None:
    document = _lifecycle(_rule(_DAYS))
    assert not _ends(document, [_OBJECT], DAY_S * 103 - 1)
    assert _ends(document, [_OBJECT], DAY_S * 103) == [""]


@pytest.mark.parametrize(
    ("chosen", "expires"),
    [
        ("<Prefix>logs/</Prefix>", True),
        ("<Prefix>data/</Prefix>", False),
        ("<Prefix> </Prefix>", False),
        ("<Prefix>logs/ </Prefix>", False),
        ("<Filter><Prefix>logs/</Prefix></Filter>", True),
        ("<Filter><Tag><Key>a</Key><Value>1</Value></Tag></Filter>", True),
        ("<Filter><Tag><Key>a</Key><Value>2</Value></Tag></Filter>", False),
        ("<Filter><ObjectSizeGreaterThan>10</ObjectSizeGreaterThan></Filter>", False),
        ("<Filter><ObjectSizeGreaterThan>9</ObjectSizeGreaterThan></Filter>", True),
        ("<Filter><ObjectSizeLessThan>10</ObjectSizeLessThan></Filter>", False),
        ("<Filter><And><Prefix>logs/</Prefix><Tag><Key>a</Key><Value>1</Value></Tag></And></Filter>", True),
        ("<Filter><And><Prefix>data/</Prefix><Tag><Key>a</Key><Value>1</Value></Tag></And></Filter>", False),
    ],
)
def test_a_rule_is_about_some_objects(chosen: str, expires: bool) -> None:
    tagged = replace(_OBJECT, tags={"a": "1"})
    assert bool(_ends(_lifecycle(_rule(_DAYS, chosen)), [tagged], DAY_S * 200)) == expires
    assert not _ends(_lifecycle(_rule(_DAYS, chosen, "Disabled")), [tagged], DAY_S * 200)


def test_older_versions_and_lone_markers() -> None:
    """A version's age counts from its replacement; some are kept; a marker goes when it hides nothing."""
    versions = [replace(_OBJECT, version_id=str(number), modified_s=DAY_S * (110 - number)) for number in range(5)]
    rule = "<NoncurrentVersionExpiration><NoncurrentDays>3</NoncurrentDays>{}</NoncurrentVersionExpiration>"
    assert _ends(_lifecycle(_rule(rule.format(""))), versions, DAY_S * 111) == ["3", "4"]
    newest_three = rule.format("<NewerNoncurrentVersions>3</NewerNoncurrentVersions>")
    assert _ends(_lifecycle(_rule(newest_three)), versions, DAY_S * 200) == ["4"]
    marker = replace(_OBJECT, etag="", version_id="marker")
    assert _ends(_lifecycle(_rule(_LONE)), [marker], DAY_S * 111) == ["marker"]
    assert not _ends(_lifecycle(_rule(_LONE)), [marker, versions[4]], DAY_S * 111)
    assert not _ends(_lifecycle(_rule(_DAYS)), [marker], DAY_S * 200), "a marker is no object"


def test_a_date() -> None:
    document = _lifecycle(_rule("<Expiration><Date>2024-05-01T00:00:00Z</Date></Expiration>"))
    assert not _ends(document, [_OBJECT], 1714521599.0)
    assert _ends(document, [_OBJECT], 1714521600.0) == [""]


def test_rules_have_ids() -> None:
    _, stored = read_lifecycle(_lifecycle(_rule(_DAYS), "<ID>mine</ID>" + _rule(_DAYS)))
    ids = [element.text or "" for element in fromstring(stored).iter() if element.tag.endswith("}ID")]
    assert len(ids) == len(set(ids)) == 2 and all(ids) and "mine" in ids


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ([], "MalformedXML"),
        ([_rule("")], "MalformedXML"),
        ([_rule(_DAYS, status="enabled")], "MalformedXML"),
        ([_rule(_DAYS, "")], "MalformedXML"),
        ([_rule(_DAYS, "<Prefix/><Filter/>")], "MalformedXML"),
        ([_rule(_DAYS, "<Filter><Prefix/><ObjectSizeLessThan>1</ObjectSizeLessThan></Filter>")], "MalformedXML"),
        ([_rule("<Expiration><Days>0</Days></Expiration>")], "InvalidArgument"),
        ([_rule("<Expiration><Days>soon</Days></Expiration>")], "InvalidArgument"),
        ([_rule("<Expiration><Date>2024-05-01T01:00:00Z</Date></Expiration>")], "InvalidArgument"),
        ([_rule("<Expiration><Date>tomorrow</Date></Expiration>")], "MalformedXML"),
        ([_rule("<Expiration/>")], "MalformedXML"),
        ([_rule("<NoncurrentVersionExpiration/>")], "MalformedXML"),
        ([_rule("<Transition><Days>3</Days></Transition>")], "NotImplemented"),
        ([_rule(_DAYS, "<Filter><And/></Filter>")], "MalformedXML"),
        ([_rule(_DAYS, "<Filter><And><Prefix>a</Prefix></And></Filter>")], "MalformedXML"),
        ([_rule(_DAYS + _DAYS)], "MalformedXML"),
        ([_rule(_ABORT, "<Filter><Tag><Key>a</Key><Value>1</Value></Tag></Filter>")], "InvalidRequest"),
        ([_rule(_LONE, "<Filter><ObjectSizeLessThan>9</ObjectSizeLessThan></Filter>")], "InvalidRequest"),
        (["<ID>a</ID>" + _rule(_DAYS), "<ID>a</ID>" + _rule(_DAYS)], "InvalidArgument"),
        (["<ID>" + "a" * 256 + "</ID>" + _rule(_DAYS)], "InvalidArgument"),
    ],
)
def test_lifecycles_that_cannot_be_are_refused(rules: list[str], code: str) -> None:
    with pytest.raises(S3Error) as refused:
        read_lifecycle(_lifecycle(*rules))
    assert refused.value.code == code

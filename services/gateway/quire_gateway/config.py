"""Configuration of the gateway, from QUIRE_GATEWAY_*."""

from __future__ import annotations

from dataclasses import dataclass

from quire.model.permit import TRANSFER_S_MAX
from quire_server.config import MemberConfig, beyond_loopback, files_together, setting

PREFIX = "QUIRE_GATEWAY_"


@dataclass(frozen=True, slots=True)
class GatewayConfig(MemberConfig):
    """Units are in the names."""

    listen: str = setting("127.0.0.1:7410", "host:port to listen on")
    advertise: str = setting("", "host:port under which others reach it; empty: as listened")
    node_id: str = setting("gateway-0", "name in the cluster")
    orchestrator_address: str = setting(
        "127.0.0.1:7411", "where the orchestrator listens", variable="QUIRE_ORCHESTRATOR_ADDRESS"
    )
    http_listen: str = setting("127.0.0.1:7480", "host:port of the HTTP frontend; off for none")
    http_tls_listen: str = setting("", "host:port of the HTTP frontend over HTTPS; empty for none")
    http_body_max: int = setting(
        64 << 20, "bytes of a request's body, or of a picture that is put; larger ones are refused", minimum=1
    )
    http_requests_max: int = setting(64, "images at the same time through HTTP; more wait", minimum=1)
    pictures_max: int = setting(
        8,
        "pictures at the same time that clients put by gRPC; more wait",
        minimum=1,
    )
    http_cache_control: str = setting("public, no-cache", "what caches are told of images over HTTP")
    http_origins: str = setting("", "origins whose pages may fetch images (CORS), by commas; *: all; empty: none")
    images_presets: str = setting("", "NAME=QUERY;…: forms of images that `preset=NAME` means over HTTP")
    images_free_form: bool = setting(True, "over HTTP images may be asked for in other forms than presets")
    images_kept_bytes: int = setting(64 << 20, "memory for images that were just sent over HTTP", minimum=0)
    images_enlarge: bool = setting(False, "images may be asked for larger than they are")
    s3_listen: str = setting("127.0.0.1:7481", "host:port of the S3 frontend; off for none")
    s3_tls_listen: str = setting("", "host:port of the S3 frontend over HTTPS; empty for none")
    s3_domain: str = setting("", "BUCKET.this is a bucket's host (virtual-host style); empty: path style only")
    s3_region: str = setting("us-east-1", "what clients are told; signatures may name any")
    s3_encrypted: bool = setting(
        False, "the object tier encrypts its bytes: clients may ask for SSE-S3 (AES256), and are answered so"
    )
    s3_public: bool = setting(
        False, "tenants may let anyone read a bucket (x-amz-acl: public-read), as /TENANT:BUCKET, without a signature"
    )
    s3_upload_days: float = setting(7.0, "age at which unfinished multipart uploads are aborted; 0: never", minimum=0)
    s3_requests_max: int = setting(
        512, "S3 requests at a time, which tenants share; more are answered with SlowDown", minimum=1
    )
    s3_bytes_max: int = setting(
        2 << 30, "bytes read for S3 clients and not sent yet, which tenants share", minimum=64 << 20
    )
    tls_listen: str = setting("", "host:port of gRPC over TLS, for clients; empty for none")
    tls_cert: str = setting("", "PEM file of the certificate that clients see, and its chain")
    tls_key: str = setting("", "PEM file of its private key")
    page_listen: str = setting("", "host:port of a web page that shows the cluster, for operators; empty: closed")
    admin_listen: str = setting("", "host:port of the admin frontend; empty: closed")
    auth: str = setting(
        "off",
        "tokens: gRPC and images want a key of `quire keys`; off: every caller on this host is allowed; "
        "everyone: every caller who reaches the gateway",
        choices=("off", "tokens", "everyone"),
    )
    audit_log: str = setting("", "file for the audit log; empty: standard error output, beside the log")
    audit_otlp: bool = setting(False, "send the audit log to OTEL_EXPORTER_OTLP_ENDPOINT, too, as log records")
    accept_unproven_addresses: bool = setting(
        False,
        "with tokens: let clients of the release before, which prove no addresses, name memory",
        variable="QUIRE_GATEWAY_ACCEPT_UNPROVEN",
    )
    tenant_requests_max: int = setting(128, "requests of one tenant at the same time; 0: no limit", minimum=0)
    tenant_bytes_max: int = setting(0, "bytes of one tenant on their way; 0: no limit", minimum=0)
    tenant_memory_max: int = setting(
        0, "bytes of memory that a tenant's running requests may name; 0: no limit", minimum=0
    )
    late_max_ms: int = setting(500, "a gateway that runs later than this takes no transfers; 0: it does", minimum=0)
    object_url: str = setting("quire-objects", "bytes of S3 objects: s3://, gs://, az:// or a folder", folders=True)
    object_timeout_s: float = setting(30.0, "deadline of one request to the object tier", minimum=0.1)
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        "where the metadata live: redis://, rediss://, unix://, redis+cluster://, redis+sentinel://",
        variable="QUIRE_REDIS_URL",
    )
    profiles: str = setting("", "folder with compute profiles of your own (`quire profile`)", variable="QUIRE_PROFILES")
    fetch_fixed_ms: float = setting(10.0, "what a fetch costs besides its bytes, in a look-up's advice", minimum=0)
    lease_ttl_ms_max: int = setting(300_000, "longest lease", minimum=1)
    retention_s_max: int = setting(30 * 24 * 3600, "longest retention of a prefix; 0 allows none", minimum=0)
    members_ms: int = setting(500, "how often the cluster's members are looked up", minimum=10)
    decode_timeout_s: float = setting(30.0, "deadline of one decoder's answer", minimum=0.1)
    control_timeout_s: float = setting(5.0, "deadline of look-ups and other short requests", minimum=0.01)
    transfer_timeout_s: float = setting(120.0, "deadline of deliveries and stores", minimum=0.1, maximum=TRANSFER_S_MAX)
    transfers_max: int = setting(256, "deliveries and stores at the same time; more are refused", minimum=1)
    requests_max: int = setting(
        1024, "gRPC requests at a listener at the same time, which tenants share; more are refused", minimum=1
    )
    sessions_max: int = setting(
        1024, "clients' sessions at the same time; tenants share them, and more are refused", minimum=1
    )
    sessions_bytes_max: int = setting(
        256 << 20, "bytes of sessions' unserved requests; tenants share them, and more are refused", minimum=1
    )
    session_requests_max: int = setting(256, "requests of one session at the same time; more are refused", minimum=1)
    connection_age_s: float = setting(
        0.0,
        "after how long gRPC clients connect anew, to whichever gateways there are by then; 0: never",
        minimum=0,
    )
    session_grace_ms: int = setting(5000, "for how long a session whose stream broke is kept", minimum=0)
    session_renew_ms: int = setting(30_000, "how often clients show their credentials again", minimum=100)
    stop_grace_s: float = setting(5.0, "time for running requests at SIGTERM", minimum=0)

    @property
    def certificates(self) -> list[str]:
        return [file for file in (self.cluster_ca, self.cluster_cert, self.tls_cert) if file]

    def problems(self) -> list[str]:
        problems = MemberConfig.problems(self)
        files = {"QUIRE_GATEWAY_TLS_CERT": self.tls_cert, "QUIRE_GATEWAY_TLS_KEY": self.tls_key}
        if (self.tls_listen or self.s3_tls_listen or self.http_tls_listen) and not any(files.values()):
            problems.append(
                "QUIRE_GATEWAY_TLS_CERT, QUIRE_GATEWAY_TLS_KEY: must be set, as there is an address with TLS"
            )
        public = [
            address
            for address in (self.listen, self.tls_listen, self.http_listen, self.http_tls_listen)
            if beyond_loopback(address)
        ]
        if self.auth == "off" and public:
            problems.append(
                f"QUIRE_GATEWAY_AUTH=off: {', '.join(public)} can be reached from other hosts; set tokens, or everyone "
                "where only those whom you trust reach it"
            )
        return problems + files_together(files)

    @property
    def asks_for_tokens(self) -> bool:
        """Whether there are tenants; without tokens there is one."""
        return self.auth == "tokens"

"""A push over HTTPS to a real server that asks for the client's certificate: nobody else gets in."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from harness import TOKEN, Server
from harness.checkpoints import read_weights
from trainer_client import PushFailed, WeightClient
from trainer_client.control import Control
from vllm_nixl_plugin.errors import InvalidRequest

Key = ec.EllipticCurvePrivateKey


Signer = tuple[x509.Certificate, Key]


def certificate(folder: Path, name: str, issuer: Signer | None = None) -> Signer:
    """A certificate and its key, also as ``name.pem`` and ``name.key``; of its own authority without an issuer."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return made, key


class TlsServer(Server):
    """A server that speaks HTTPS to clients with a certificate of the authority in ``folder``."""

    def __init__(self, model: Path, folder: Path) -> None:
        args = ["--ssl-certfile", f"{folder}/server.pem", "--ssl-keyfile", f"{folder}/server.key"]
        super().__init__(model, args=[*args, "--ssl-ca-certs", f"{folder}/ca.pem", "--ssl-cert-reqs", "2"])
        self.trust = ssl.create_default_context(cafile=f"{folder}/ca.pem")
        self.trust.load_cert_chain(f"{folder}/trainer.pem", f"{folder}/trainer.key")

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def _wait_until_healthy(self, deadline: float) -> None:
        with httpx.Client(timeout=5, verify=self.trust) as client:
            while time.monotonic() < deadline and self.returncode() is None:
                try:
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                except httpx.TransportError:
                    time.sleep(0.1)
        raise RuntimeError(f"the server did not start\n{self.log_tail()}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority = certificate(tmp_path, "ca")
    for name in ("server", "trainer"):
        certificate(tmp_path, name, authority)
    certificate(tmp_path, "stranger")
    return tmp_path


@pytest.mark.server
def test_a_push_over_https_needs_the_clients_certificate_and_the_servers(
    folder: Path, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = read_weights(checkpoint("qwen3", seed=2))
    with TlsServer(checkpoint("qwen3", seed=1), folder) as server:
        monkeypatch.setenv("PUSH_WEIGHTS_CA_FILE", f"{folder}/ca.pem")
        monkeypatch.setenv("PUSH_WEIGHTS_CERT_FILE", f"{folder}/trainer.pem")
        monkeypatch.setenv("PUSH_WEIGHTS_KEY_FILE", f"{folder}/trainer.key")
        with WeightClient([server.url], token=TOKEN) as client:
            client.push_weights(weights, version="encrypted")
        with Control(server.url, token=TOKEN) as control:
            assert control.status().weight_version == "encrypted"
        for name, value in (("PUSH_WEIGHTS_CERT_FILE", "stranger.pem"), ("PUSH_WEIGHTS_CA_FILE", "stranger.pem")):
            with monkeypatch.context() as changed:
                changed.setenv(name, f"{folder}/{value}")
                changed.setenv("PUSH_WEIGHTS_KEY_FILE", f"{folder}/{'stranger' if 'CERT' in name else 'trainer'}.key")
                with WeightClient([server.url], token=TOKEN) as client, pytest.raises(PushFailed) as refused:
                    client.push_weights(weights)
                assert refused.value.report.servers[0].error_code == "unreachable"


def test_a_certificate_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(InvalidRequest, match="PUSH_WEIGHTS_CERT_FILE"):
        Control("https://localhost:1")

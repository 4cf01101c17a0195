"""What gateway workers are told; the replica's side makes it of its configuration."""

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TypeAlias

from treadle_agents.images.placeholders import ImageRule
from treadle_core.errors import InvalidFieldError
from treadle_gateway.capture.labels import LABELS

OtherSampling: TypeAlias = Literal["refuse", "untrained", "recipe"]
"""What becomes of sampling that is not the recipe's: refused; honoured and not trained; ignored."""

OTHER_SAMPLING_KEY = "rollout.gateway.other_sampling"
"""Where a recipe says it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what clients may do to a worker."""

    body_bytes: int = 32 * 1024 * 1024
    """Of one request, decompressed."""
    bodies_bytes: int = 512 * 1024 * 1024
    """Of all bodies that are on their way to a worker."""
    body_s: float = 30.0
    """Seconds in which a body has to arrive whole."""
    slow_reader_s: float = 60.0
    """Seconds in which what was written has to leave for the client."""
    ping_s: float = 10.0
    """Seconds of silence after which a stream says that it is alive."""
    requests: int = 1024
    """Requests of a worker that run at once."""
    wait_s: float = 60.0
    """Most seconds that a client may wait for an episode."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What every worker of a gateway is told."""

    model_folder: Path
    """Hugging Face folder with the tokenizer and the template of the policy."""
    model_name: str
    """The one name that the policy has for clients."""
    max_context: int
    """Most tokens of prompt and reply together."""
    log: Path
    """File that workers append to."""
    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback only with a certificate, or `insecure_dev`."""
    port: int = 0
    """Of the first worker, the others follow; 0: each as the system chooses."""
    advertise: str = ""
    """Host name in the URLs that clients are given; empty: `host`."""
    certificate: Path | None = None
    """Chain of certificates, PEM; with it the wires are HTTPS."""
    private_key: Path | None = None
    """Of the certificate, PEM."""
    insecure_dev: bool = False
    """Lets workers listen beyond loopback in the open."""
    run_token: str = field(default="", repr=False)
    """With it a client may take an offered episode by `POST /sessions`; empty: nobody may."""
    other_sampling: OtherSampling = "refuse"
    trained: frozenset[str] = frozenset(LABELS)
    """Labels whose turns are trained."""
    supported: frozenset[str] = frozenset()
    """Fields of Sampling, beside temperature and max_tokens, that the engine honours."""
    images: ImageRule | None = None
    """How many tokens the engine makes of an image; None: it reads none."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        """Refuses to be open to a network."""
        open_wire = self.certificate is None and not self.insecure_dev
        if open_wire and not _is_loopback(self.host):
            raise InvalidFieldError(
                "gateway.host", limit="loopback, a certificate, or insecure_dev", value=self.host
            )
        if (self.certificate is None) != (self.private_key is None):
            raise InvalidFieldError(
                "gateway.certificate", limit="with its private_key", value=self.certificate
            )


def settings_to_map(settings: GatewaySettings) -> dict[str, Any]:
    """What a worker is sent: of the run token only its digest."""
    said = asdict(settings)
    said["run_token"] = ""
    said |= {"trained": sorted(settings.trained), "supported": sorted(settings.supported)}
    paths = ("model_folder", "log", "certificate", "private_key")
    said |= {name: None if said[name] is None else str(said[name]) for name in paths}
    digest = sha256(settings.run_token.encode()).digest() if settings.run_token else b""
    return said | {"run_token_sha256": digest}


def settings_from_map(said: Mapping[str, Any]) -> tuple[GatewaySettings, bytes]:
    """The settings without the run token, and its digest; empty where there is none."""
    known = {each.name: said[each.name] for each in fields(GatewaySettings)}
    known["limits"] = Limits(**known["limits"])
    known["images"] = None if known["images"] is None else ImageRule(**known["images"])
    known |= {name: frozenset(known[name]) for name in ("trained", "supported")}
    for name in ("model_folder", "log", "certificate", "private_key"):
        known[name] = None if known[name] is None else Path(known[name])
    return GatewaySettings(**known), said["run_token_sha256"]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

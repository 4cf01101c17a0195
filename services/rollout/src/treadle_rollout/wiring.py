"""How a replica's agents, gateway and player are made of its configuration."""

from collections.abc import Callable
from dataclasses import dataclass

from treadle_core.errors import InvalidFieldError
from treadle_gateway.settings import GatewaySettings
from treadle_rollout.adapters.gateway_sessions import GatewaySessions
from treadle_rollout.adapters.worker_pool import AgentPool
from treadle_rollout.adapters.worker_process import WorkerSettings
from treadle_rollout.config import EXTERNAL, GatewayConfig, RolloutConfig
from treadle_rollout.frames import AgentKind
from treadle_rollout.players import (
    ChatPlayer,
    EnvPlayer,
    ExternalPlayer,
    Player,
    SessionTerms,
    Worth,
)
from treadle_rollout.ports import Engine
from treadle_runtime import plugins
from treadle_runtime.workers.process import WorkerStartError


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays."""

    player: Player
    pool: AgentPool | None
    """Agents of ours."""
    sessions: GatewaySessions | None
    """Where agents talk to the policy."""

    @property
    def supervised(self) -> list[AgentPool | GatewaySessions]:
        """What runs beside the episodes."""
        return [each for each in (self.pool, self.sessions) if each is not None]

    @property
    def offers(self) -> GatewaySessions | None:
        """Where clients take episodes; None where they are played here."""
        return self.sessions if self.pool is None else None

    def row(self) -> dict[str, float]:
        """For the metrics (docs/metrics.md)."""
        return {
            "worker_restarts": self.pool.restarts if self.pool else 0,
            "gateway_restarts": self.sessions.restarts if self.sessions else 0,
        }


async def agents_of(cfg: RolloutConfig) -> AgentPool | None:
    """Agents that are ready to play; None where nobody plays here.

    Raises PluginError where they cannot be.
    """
    tokenizer = cfg.run.model / "tokenizer.json"
    if not tokenizer.is_file():
        raise InvalidFieldError("run.model", limit="a folder with tokenizer.json", value=tokenizer)
    if cfg.agent.name == EXTERNAL:
        return None
    settings = WorkerSettings(
        tokenizer=tokenizer,
        agent=cfg.agent.name,
        parameters=cfg.agent.parameters,
        places=-(-cfg.slots // cfg.workers),
        log=cfg.run.dir / "logs" / "agents.log",
    )
    pool = AgentPool(settings, cfg.workers)
    try:
        await pool.start()
    except WorkerStartError as error:
        raise plugins.PluginError(f"agent {cfg.agent.name!r}: {error}") from error
    return pool


async def cast_of(
    cfg: RolloutConfig, pool: AgentPool | None, engine: Engine, on_tokens: Callable[[int], None]
) -> Cast:
    """A gateway that serves, where one is wanted, and who plays.

    Raises PluginError where the gateway cannot serve the run's model.
    """
    talks = pool is None or pool.kind is AgentKind.CHAT
    worth = Worth(cfg.failure_reward)
    sessions = None
    if talks or cfg.gateway is not None:
        sessions = await _gateway(cfg, engine, on_tokens)
    if sessions is None or (pool is not None and not talks):
        assert pool is not None  # noqa: S101, who does not talk is played here
        player = EnvPlayer(engine, pool, cfg.max_turns, worth, on_tokens)
        return Cast(player, pool, sessions)
    terms = _terms(cfg.gateway or GatewayConfig())
    if pool is None:
        return Cast(ExternalPlayer(sessions, terms, cfg.slots), None, sessions)
    return Cast(ChatPlayer(pool, sessions, terms, worth, engine.max_context), pool, sessions)


async def _gateway(
    cfg: RolloutConfig, engine: Engine, on_tokens: Callable[[int], None]
) -> GatewaySessions:
    gateway = cfg.gateway or GatewayConfig()
    try:
        run_token = gateway.run_token
    except ValueError as error:
        raise plugins.PluginError(f"gateway.{error}") from error
    settings = GatewaySettings(
        model_folder=cfg.run.model,
        model_name=gateway.model_name,
        max_context=engine.max_context,
        log=cfg.run.dir / "logs" / "gateway.log",
        host=gateway.host,
        port=gateway.port,
        advertise=gateway.advertise,
        certificate=gateway.certificate,
        private_key=gateway.private_key,
        insecure_dev=cfg.run.insecure_dev,
        run_token=run_token,
        other_sampling=gateway.other_sampling,
        trained=frozenset(gateway.trained),
        supported=engine.samplings,
        images=engine.images,
    )
    sessions = GatewaySessions(settings, gateway.workers, engine, on_tokens)
    try:
        await sessions.start()
    except WorkerStartError as error:
        raise plugins.PluginError(f"gateway: {error}") from error
    return sessions


def _terms(gateway: GatewayConfig) -> SessionTerms:
    return SessionTerms(
        gateway.max_requests,
        gateway.max_concurrent,
        gateway.max_sampled,
        gateway.max_images,
        gateway.max_image_bytes,
    )

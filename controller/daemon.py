"""`trimtab serve`: starts or joins Ray, brings up the gateway and /metrics, stops them again."""

import hashlib
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from trimtab.controller.exporter import serve_metrics
from trimtab.controller.gateway import Gateway
from trimtab.controller.loader import load_policy

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 10.0
OBJECT_STORE_BYTES = 80_000_000
"""Ray's least: nothing large goes through it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How the controller runs."""

    policy: Path
    host: str = "127.0.0.1"
    """Address to bind to; jobs on other nodes need one that they can reach."""
    port: int = 7461
    """Of the gateway; 0: any free one."""
    metrics_port: int = 9461
    """Of /metrics; 0: any free one."""
    store: str = "sqlite:///trimtab.db"
    """SQLAlchemy URL of the journal."""
    ray_address: str = "local"
    """A Ray cluster to join, or "local" for one of its own."""
    ready_file: Path | None = None
    """Written when the controller is up: {"address": ..., "metrics": ...}."""


def serve(config: ServeConfig, started: Callable[[str, str], None]) -> None:
    """Run the controller until SIGINT or SIGTERM.

    Args:
        config: How.
        started: Called once with the gateway's address and the URL of /metrics.

    Raises:
        PolicyError: If the policy cannot be used; nothing was started.
        OSError: If a port is taken.
    """
    policy = load_policy(config.policy)
    folder = tempfile.mkdtemp(prefix="trimtab-")
    try:
        # A store is one controller's: on a shared cluster its actors are told apart by it.
        namespace = "trimtab-" + hashlib.sha256(config.store.encode()).hexdigest()[:12]
        _start_ray(config, namespace, folder)
        _end_actors(namespace)  # of a former life that was killed
        gateway: Any = (
            ray.remote(Gateway)
            .options(num_cpus=0, max_concurrency=1000, lifetime="detached", name="gateway")
            .remote((policy.name, policy.text), config.store, config.host)
        )
        port = ray.get(gateway.start.remote(config.port))
        metrics_port, stop_metrics = serve_metrics(
            lambda: ray.get(gateway.statuses.remote(), timeout=STATUS_TIMEOUT_S),
            config.host,
            config.metrics_port,
        )
        address = f"{config.host}:{port}"
        metrics = f"http://{config.host}:{metrics_port}/metrics"
        stopping = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # here: ray.init sets handlers of its own
            signal.signal(number, lambda *_: stopping.set())
        _tell(config.ready_file, {"address": address, "metrics": metrics})
        started(address, metrics)
        stopping.wait()
        stop_metrics()
        _stop(gateway)
        _end_actors(namespace)
    finally:
        if ray.is_initialized():
            ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _start_ray(config: ServeConfig, namespace: str, folder: str) -> None:
    local: dict[str, Any] = {}
    if config.ray_address == "local":
        local = {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "num_cpus": 1,
            "_temp_dir": folder,
            "_node_ip_address": "127.0.0.1",
        }
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # actors' lines go to log files
    ray.init(
        address=config.ray_address,
        namespace=namespace,
        log_to_driver=True,
        logging_level=logging.WARNING,
        **local,
    )


def _stop(gateway: Any) -> None:
    try:
        ray.get(gateway.stop.remote(), timeout=STOP_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        log.warning("the gateway did not stop in time: %s", error)


def _end_actors(namespace: str) -> None:
    """Kill our detached actors, and nobody else's: the cluster may be shared."""
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == namespace:
            ray.kill(ray.get_actor(entry["name"], namespace=namespace))


def _tell(path: Path | None, ready: dict[str, str]) -> None:
    if path is None:
        return
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(ready))
    partial.replace(path)  # whoever waits for the file sees all of it or nothing

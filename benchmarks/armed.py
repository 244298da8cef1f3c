"""Round trip from an observation to the next armed table, beside a bare gRPC echo.

    python -m benchmarks.armed [--json]

Both are one stream to another process on loopback, measured in turns from the same client.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc

from benchmarks.figures import Figure, show
from trimtab.protos import trimtab_pb2 as pb
from trimtab.protos import trimtab_pb2_grpc as rpc
from trimtab.protos import wire

ROUNDS, BLOCK = 40, 100
"""Blocks of round trips, taken in turns; the first of each is warm-up and left out."""


LAYOUT = [
    "loss", "grad_norm", "update_norm", "exp_avg_norm", "exp_avg_sq_norm", "nonfinite_count", "lr",
]  # fmt: skip
"""What a job with Adam measures."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    echo_port, echo_process = _start_echo()
    try:
        with _controller() as address:
            echo, armed = _measure(f"127.0.0.1:{echo_port}", address)
    finally:
        echo_process.terminate()
    echo_p50, armed_p50 = statistics.median(echo), statistics.median(armed)
    show(
        [
            Figure(figure="echo_p50", value=echo_p50 * 1e3, unit="ms"),
            Figure(figure="armed_p50", value=armed_p50 * 1e3, unit="ms"),
            Figure(figure="armed_p50_over_echo", value=armed_p50 / echo_p50, unit="ratio", goal=2),
            Figure(figure="armed_p99", value=_p99(armed) * 1e3, unit="ms", goal=5),
        ],
        as_json=args.json,
    )


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _measure(echo_address: str, gateway_address: str) -> tuple[list[float], list[float]]:
    layout = LAYOUT
    with grpc.insecure_channel(gateway_address) as gateway:
        answer = rpc.GatewayStub(gateway).Register(
            pb.RegisterRequest(
                protocol_version=wire.PROTOCOL_VERSION, run="benchmark", session="b", signals=layout
            )
        )
    with (
        grpc.insecure_channel(echo_address) as echo_channel,
        grpc.insecure_channel(answer.address) as armed_channel,
    ):
        echo = _Stream(echo_channel.stream_stream("/benchmark.Echo/Echo", _bytes, _bytes))
        armed = _Stream(rpc.SteeringStub(armed_channel).Steer)
        armed.ask(pb.AgentMessage(hello=pb.Hello(run="benchmark", epoch=0)))
        noise, seq = random.Random(0), iter(range(ROUNDS * BLOCK))
        payload = _observation(0, noise).SerializeToString()
        times: tuple[list[float], list[float]] = ([], [])
        for block in range(ROUNDS):
            echoed = [_timed(lambda: echo.ask(payload)) for _ in range(BLOCK)]
            told = [_timed(lambda: armed.ask(_observation(next(seq), noise))) for _ in range(BLOCK)]
            if block:
                times[0].extend(echoed)
                times[1].extend(told)
    return times


def _timed(ask: Callable[[], Any]) -> float:
    start = time.perf_counter()
    ask()
    return time.perf_counter() - start


def _observation(seq: int, noise: random.Random) -> pb.AgentMessage:
    values = [noise.uniform(0.99, 1.01) for _ in LAYOUT]
    values[LAYOUT.index("nonfinite_count")] = 0.0
    verdict = pb.Verdict(table_seq=seq - 1)
    return pb.AgentMessage(
        observation=pb.Observation(seq=seq, step=seq, values=values, verdict=verdict, lr_factor=1.0)
    )


def _bytes(message: bytes) -> bytes:
    return message


class _Stream:
    """A two-way stream used as question and answer."""

    def __init__(self, call: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self._questions: SimpleQueue[Any] = SimpleQueue()
        self._answers = call(iter(self._questions.get, None))

    def ask(self, question: Any) -> Any:
        self._questions.put(question)
        return next(self._answers)


def _start_echo() -> tuple[int, Any]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_echo, args=(theirs,))
    process.start()
    return ours.recv(), process


def _echo(pipe: Any) -> None:
    async def echo(requests: Any, _context: Any) -> Any:
        async for request in requests:
            yield request

    async def serve() -> None:
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(echo, _bytes, _bytes)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("benchmark.Echo", {"Echo": handler}),)
        )
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


@contextmanager
def _controller() -> Iterator[str]:
    """Yield the address of a controller with the default policy."""
    policy = files("trimtab.policies") / "default.yaml"
    with tempfile.TemporaryDirectory() as name:
        ready = Path(name) / "ready.json"
        command = [sys.executable, "-m", "trimtab", "serve", "--policy", str(policy)]
        command += ["--port", "0", "--metrics-port", "0", "--ready-file", str(ready)]
        command += ["--store", str(Path(name) / "journal.db")]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise RuntimeError("trimtab serve did not come up")
                time.sleep(0.1)
            yield str(json.loads(ready.read_text())["address"])
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()

"""What the probe costs, against the memory floor, per-parameter norms, and whole training steps.

    python -m benchmarks.probe [--json] [--quick]

One thread, everything in turns in one process.  The floor reads gradient, m and v once; the monitor
is what per-parameter loggers do: four norms of each parameter, each read back to Python.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from rich.console import Console
from torch import Tensor, nn

from benchmarks.figures import Figure, show
from trimtab.agent.groups import group_of
from trimtab.agent.probe.adding import Place
from trimtab.agent.probe.measure import Probe
from trimtab.demo import workload

ROUNDS, BLOCK = 7, 3
"""Blocks taken in turns; the first of each block is warm-up and left out."""

SMALL, LARGE = 20_000_000, 100_000_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="without 100M and GPT-2 124M")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    for size in (SMALL,) if args.quick else (SMALL, LARGE):
        figures += _against_the_floor(size)
    figures += _of_a_step("byte_gpt", workload.ByteGPT(), 256, rows=16, time_=workload.CONTEXT)
    if not args.quick:
        figures += _of_a_step("gpt2_124m", GPT2(), 50257, rows=1, time_=256)
    show(figures, as_json=args.json)
    if not args.json:
        Console().print(
            "floor: g.sum(), m.sum(), v.sum(). _sketch: a step on which m/sqrt(v) is sketched and"
            " parameter norms are taken; mean: over ten steps, one of them with the sketch.\n"
            "tokens: of a step, from which on the probe takes at most 1 % of it."
        )


def _against_the_floor(size: int) -> list[Figure]:
    """Return the probe's time over reading g, m and v once, and the monitor's over the probe's."""
    parameters = _matrices(size)
    optimizer = _stepped(parameters)
    probe, eager = (_probe(optimizer, parameters, compiling=c) for c in ("always", "never"))
    moments = [optimizer.state[p] for p in parameters]

    def floor() -> None:
        for parameter, state in zip(parameters, moments, strict=True):
            assert parameter.grad is not None
            parameter.grad.sum(), state["exp_avg"].sum(), state["exp_avg_sq"].sum()

    def monitor() -> None:
        for parameter, state in zip(parameters, moments, strict=True):
            assert parameter.grad is not None
            update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
            for tensor in (parameter.grad, parameter.detach(), state["exp_avg"], update):
                torch.linalg.vector_norm(tensor).item()

    took = _in_turns(
        {
            "floor": floor,
            "norms": lambda: probe.measure(1.0),
            "sketch": lambda: probe.measure(1.0, slow=True),
            "eager": lambda: eager.measure(1.0),
            "monitor": monitor,
        }
    )
    name, base = f"probe_{size // 1_000_000}m", took["floor"]
    mean = (9 * took["norms"] + took["sketch"]) / 10
    return [
        Figure(figure=f"{name}_floor", value=base * 1e3, unit="ms"),
        Figure(figure=f"{name}_over_floor", value=took["norms"] / base, unit="ratio", goal=1.5),
        Figure(
            figure=f"{name}_sketch_over_floor", value=took["sketch"] / base, unit="ratio", goal=2.5
        ),
        Figure(figure=f"{name}_mean_over_floor", value=mean / base, unit="ratio"),
        Figure(figure=f"{name}_uncompiled_over_floor", value=took["eager"] / base, unit="ratio"),
        Figure(
            figure=f"{name}_monitor_over_probe",
            value=took["monitor"] / took["norms"],
            unit="ratio",
            goal=8,
            better="higher",
        ),
        Figure(
            figure=f"{name}_peak_over_model",
            value=_peak_bytes(lambda: probe.measure(1.0, slow=True)) / (4 * size),
            unit="ratio",
        ),
    ]


def _of_a_step(
    name: str, model: nn.Module, vocabulary: int, *, rows: int, time_: int
) -> list[Figure]:
    """Return the probe's share of a training step, and from how many tokens on it is 1 %."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, vocabulary, (rows, time_ + 1))

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, vocabulary), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()

    def update() -> None:
        optimizer.step()

    step()
    groups: dict[str, int] = {}
    places = {
        p: Place(groups.setdefault(group_of(n), len(groups)), 1.0)
        for n, p in model.named_parameters()
    }
    probe = Probe(optimizer, places, len(groups), compile="always")
    took = _in_turns(
        {
            "step": step,
            "update": update,
            "norms": lambda: probe.measure(1.0),
            "sketch": lambda: probe.measure(1.0, slow=True),
        }
    )
    mean = (9 * took["norms"] + took["sketch"]) / 10
    # Forward and backward grow with the tokens, the optimizer and the probe do not.
    per_token = (took["step"] - took["update"]) / (rows * time_)
    enough = max(0.0, 99 * mean - took["update"]) / per_token
    return [
        Figure(figure=f"{name}_step", value=took["step"] * 1e3, unit="ms"),
        Figure(figure=f"{name}_tokens", value=rows * time_, unit="tokens"),
        Figure(figure=f"{name}_probe_share", value=100 * mean / took["step"], unit="%", goal=1),
        Figure(figure=f"{name}_tokens_for_1_percent", value=enough, unit="tokens"),
    ]


def _matrices(size: int) -> list[nn.Parameter]:
    """Return parameters of a transformer's kind: large matrices, and vectors between them."""
    width = 1000
    parameters = []
    while size >= 4 * width * width:
        parameters += [
            nn.Parameter(torch.randn(4 * width, width) * 0.02),
            nn.Parameter(torch.zeros(width)),
        ]
        size -= 4 * width * width
    return parameters


def _stepped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        optimizer.step()
    return optimizer


def _probe(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], *, compiling: str
) -> Probe:
    groups = max(1, len(parameters) // 4)
    places = {p: Place(at * groups // len(parameters), 1.0) for at, p in enumerate(parameters)}
    return Probe(optimizer, places, groups, compile=compiling)


def _in_turns(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            for at in range(BLOCK):
                start = time.perf_counter()
                run()
                if at:
                    took[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in took.items()}


def _peak_bytes(run: Callable[[], object]) -> int:
    """Return the greatest allocation of torch on the CPU during a run, from its profiler."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415  slow to import

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


class GPT2(nn.Module):
    """GPT-2 small: 124M parameters, tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50257, 768), nn.Embedding(1024, 768)
        self.h = nn.ModuleList(
            nn.TransformerEncoderLayer(
                768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(12)
        )
        self.ln_f = nn.LayerNorm(768)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (rows, time, 50257)."""
        hidden = self.wte(x) + self.wpe.weight[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.h:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return F.linear(self.ln_f(hidden), self.wte.weight)


if __name__ == "__main__":
    main()

"""The ranks' agreement on what they measure: layer groups, and what each element counts for.

Every rank brings the parameters that it holds, whole or as a shard.  How often an element is held
follows from the sizes alone, so one rule serves every layout: plain, DDP, FSDP2, HSDP, tensor
parallel, pipeline stages, and what is made of them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimtab.agent.groups import GroupOf, group_of, plain_name
from trimtab.agent.probe.adding import Place
from trimtab.agent.probe.measure import local
from trimtab.agent.ranks import Ranks

OUTSIDE = "outside_model"
"""Layer group of parameters that the optimizer has and the model has not."""


class RegistrationError(Exception):
    """The ranks do not fit together, so that nothing can be measured rightly."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter as one rank knows it."""

    name: str
    group: str
    shape: tuple[int, ...]
    """Of the whole parameter."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What all ranks agreed on."""

    groups: tuple[str, ...]
    """Layer groups of the whole job, from the input to the output."""
    places: Mapping[nn.Parameter, Place]
    """This rank's parameters."""
    neurons: frozenset[nn.Parameter]
    """Those whose rows are neurons."""


def register(
    ranks: Ranks,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    facts: Mapping[str, str],
    grouping: GroupOf | None = None,
) -> Registration:
    """Agree with all other ranks.  To be called on every rank.

    Args:
        ranks: The job's processes.
        model: Gives the parameters their names and their order.
        optimizer: Whose parameters are measured.
        facts: What must be the same everywhere: versions, settings.
        grouping: From the name of a parameter to that of its layer group.

    Raises:
        RegistrationError: On every rank, with the ranks that differ and what they differ in.
    """
    problem, held = "", {}
    try:
        held = _held(model, optimizer, grouping or group_of)
    except Exception as error:  # noqa: BLE001  the other ranks must hear of it
        problem = str(error) if isinstance(error, RegistrationError) else repr(error)
    entries = [(e.name, e.group, e.shape) for e in held.values()]
    facts = {"optimizer": type(optimizer).__name__, **facts}
    text = json.dumps([problem, dict(sorted(facts.items())), entries])
    tables = _distinct(ranks, text)
    for rank, (said, _, _) in tables.items():
        if said:
            raise RegistrationError(f"rank {rank}: {said}")
    _check_facts({rank: said for rank, (_, said, _) in tables.items()})
    merged = _merged({rank: rows for rank, (_, _, rows) in tables.items()})
    shares = _shares(ranks, held, merged)
    groups = tuple(dict.fromkeys(entry.group for entry in merged.values()))
    rows = {group: row for row, group in enumerate(groups)}
    embeddings = {
        id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    return Registration(
        groups=groups,
        places={p: Place(rows[e.group], shares[e.name]) for p, e in held.items()},
        neurons=frozenset(p for p in held if p.dim() == 2 and id(p) not in embeddings),
    )


def _held(
    model: nn.Module, optimizer: torch.optim.Optimizer, grouping: GroupOf
) -> dict[nn.Parameter, Entry]:
    """Return the optimizer's parameters in the order of the model."""
    wanted = {p for group in optimizer.param_groups for p in group["params"]}
    held: dict[nn.Parameter, Entry] = {}
    for name, parameter in model.named_parameters():
        if parameter not in wanted:
            continue
        if getattr(parameter, "_is_flat_param", False):
            raise RegistrationError(
                "FSDP1 (FullyShardedDataParallel) is not supported: its parameters are cut without"
                " regard to layers; use FSDP2 (torch.distributed.fsdp.fully_shard)"
            )
        plain = plain_name(name)
        held[parameter] = Entry(plain, str(grouping(plain)), tuple(parameter.shape))
    for at, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in held:
                name = f"{OUTSIDE}.{at}.{place}"
                held[parameter] = Entry(name, OUTSIDE, tuple(parameter.shape))
    return held


def _distinct(ranks: Ranks, text: str) -> dict[int, tuple[str, dict[str, str], list[Entry]]]:
    """Return what the ranks say, once each: the first rank that says it to what it says.

    Ranks of one kind (all of them but under a pipeline) say the same; only its hash is gathered.
    """
    digest = hashlib.sha256(text.encode()).digest()
    first: dict[bytes, int] = {}
    for rank, said in enumerate(ranks.gather(digest)):
        first.setdefault(said, rank)
    tables = {}
    for rank in first.values():
        problem, facts, entries = json.loads(ranks.share_from(rank, text.encode()))
        tables[rank] = (problem, facts, [Entry(n, g, tuple(s)) for n, g, s in entries])
    return tables


def _check_facts(facts: Mapping[int, Mapping[str, str]]) -> None:
    (first, expected), *others = facts.items()
    for rank, said in others:
        for name, value in expected.items():
            if said.get(name) != value:
                raise RegistrationError(
                    f"ranks {first} and {rank} differ: {name} is {value} and {said.get(name)}"
                )


def _merged(tables: Mapping[int, list[Entry]]) -> dict[str, Entry]:
    """Return every parameter of the job by name, in the order of the ranks."""
    merged: dict[str, Entry] = {}
    brought: dict[str, int] = {}
    for rank, entries in tables.items():
        for entry in entries:
            known = merged.setdefault(entry.name, entry)
            brought.setdefault(entry.name, rank)
            if known != entry:
                what = "layer group" if known.shape == entry.shape else "shape"
                values = [
                    e.group if what == "layer group" else list(e.shape) for e in (known, entry)
                ]
                raise RegistrationError(
                    f"ranks {brought[entry.name]} and {rank} differ: the {what} of parameter"
                    f" {entry.name} is {values[0]} and {values[1]}"
                )
    return merged


def _shares(
    ranks: Ranks, held: Mapping[nn.Parameter, Entry], merged: Mapping[str, Entry]
) -> dict[str, float]:
    """Return what each local element of a parameter counts for: 1 over how often it is held.

    Raises:
        RegistrationError: If ranks hold whole parameters of one name that are not alike.
    """
    columns = {name: at for at, name in enumerate(merged)}
    sizes = torch.zeros(len(merged), dtype=torch.float64)
    # Least and greatest of what whole parameters add up to: replicas hold the same.
    least = torch.full_like(sizes, torch.inf)
    for parameter, entry in held.items():
        part = local(parameter.detach())
        at = columns[entry.name]
        sizes[at] += part.numel()
        if not hasattr(parameter, "to_local"):  # a DTensor's own layout says what it replicates
            least[at] = _fingerprint(part)
    greatest = torch.where(least.isinf(), -torch.inf, least)
    ranks.total(sizes)
    ranks.least(least)
    greatest = -ranks.least(-greatest)
    for name, at in columns.items():
        if least[at] < greatest[at]:
            raise RegistrationError(
                f"parameter {name} is whole on several ranks, but not the same on all of them:"
                " expert parallelism over plain tensors is not supported, pipeline stages need"
                " names of their own (the model's, as torch.distributed.pipelining keeps them), and"
                " replicas must start alike (make the Guard after DistributedDataParallel)"
            )
    shares = {}
    for name, at in columns.items():
        whole = 1
        for size in merged[name].shape:
            whole *= size
        shares[name] = whole / float(sizes[at]) if sizes[at] else 0.0
    return shares


def _fingerprint(part: Tensor) -> float:
    """Return a number that differs for different parameters, nearly always."""
    if part.numel() == 0:
        return 0.0
    sample = part.reshape(-1)[:: 1 + part.numel() // 4096].double()
    weights = torch.linspace(1.0, 2.0, sample.numel(), dtype=torch.float64, device=part.device)
    return float(torch.nan_to_num(sample * weights).sum())

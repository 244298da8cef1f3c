"""Layer groups: named sets of parameters whose statistics are kept apart."""

import re
from collections.abc import Callable

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_INDEX = re.compile(r"(?:\w+_)?\d+")
"""A path component that numbers a block: "3", "encoder_layer_3"."""

GroupOf = Callable[[str], str]
"""From the name of a parameter, as in `model.named_parameters()`, to that of its layer group."""


def plain_name(name: str) -> str:
    """Return the name of a parameter without what DDP, FSDP, compile and checkpointing add."""
    return _WRAPPERS.sub("", name)


def group_of(name: str) -> str:
    """Return the layer group of a parameter by the structure of its module.

    Up to the first numbered block, else the module: `transformer.h.3.attn.c_attn.weight` is in
    `transformer.h.3`, `model.layers.10.mlp.up_proj.weight` in `model.layers.10`,
    `encoder.layers.encoder_layer_3.ln_1.bias` in `encoder.layers.encoder_layer_3`,
    `transformer.wte.weight` in `transformer.wte`, `0.weight` in `0`.
    """
    path = name.split(".")
    for at, part in enumerate(path[:-1]):
        if _INDEX.fullmatch(part):
            return ".".join(path[: at + 1])
    return ".".join(path[:-1]) or name

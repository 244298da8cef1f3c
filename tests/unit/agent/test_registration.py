"""One process registers: layer groups by name, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParameter

from trimtab.agent.groups import group_of, plain_name
from trimtab.agent.ranks import Ranks
from trimtab.agent.registration import OUTSIDE, RegistrationError, register


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("transformer.wte.weight", "transformer.wte"),
        ("transformer.h.3.attn.c_attn.weight", "transformer.h.3"),
        ("transformer.ln_f.bias", "transformer.ln_f"),
        ("lm_head.weight", "lm_head"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.layers.10.self_attn.q_proj.weight", "model.layers.10"),
        ("model.layers.10.mlp.experts.7.w1.weight", "model.layers.10"),
        ("encoder.layers.encoder_layer_3.mlp.0.weight", "encoder.layers.encoder_layer_3"),
        ("blocks.11.attn.qkv.bias", "blocks.11"),
        ("patch_embed.proj.weight", "patch_embed.proj"),
        ("cls_token", "cls_token"),
        ("0.weight", "0"),
        ("fc1.weight", "fc1"),
        ("layer1.0.conv1.weight", "layer1.0"),
    ],
)
def test_layer_groups_follow_the_blocks(name: str, group: str) -> None:
    assert group_of(name) == group


@pytest.mark.parametrize(
    "name",
    [
        "module.h.0.weight",
        "_orig_mod.h.0.weight",
        "module._orig_mod.h.0._checkpoint_wrapped_module.weight",
    ],
)
def test_wrappers_leave_no_trace_in_names(name: str) -> None:
    assert plain_name(name) == "h.0.weight"


def test_a_name_that_only_looks_like_a_wrapper_stays() -> None:
    assert plain_name("my_module.weight") == "my_module.weight"


def test_shared_frozen_and_foreign_parameters_are_counted_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight  # tied
    foreign = nn.Parameter(torch.ones(3))
    frozen = model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([*model.parameters(), foreign])
    found = register(Ranks(), model, optimizer, {})
    assert found.groups == ("0", "1", OUTSIDE)
    assert [found.places[p].row for p in (model[0].weight, frozen, foreign)] == [0, 1, 2]
    assert {place.share for place in found.places.values()} == {1.0}
    assert found.neurons == {model[1].weight}  # the rows of an embedding are no neurons


def test_groups_can_be_named_by_a_function() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    kinds = register(Ranks(), model, optimizer, {}, lambda name: name.rsplit(".", 1)[-1])
    assert kinds.groups == ("weight", "bias")


def test_fsdp1_is_refused_by_name() -> None:
    model = nn.ParameterList([FlatParameter(torch.ones(3))])
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RegistrationError, match=r"FSDP1 .* is not supported.*use FSDP2"):
        register(Ranks(), model, optimizer, {})

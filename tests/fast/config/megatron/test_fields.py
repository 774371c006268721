"""The fields of Megatron's own dataclasses as flags."""

import argparse
import sys

import miles.config.megatron.fields
from miles.config.megatron.fields import DESTINATION, MegatronField, add_megatron_flags, megatron_fields


def test_fields_are_read_without_importing_megatron():
    before = set(sys.modules)
    fields = megatron_fields()
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in ("megatron", "torch")}
    assert len(fields) > 200
    assert fields["layernorm_epsilon"].flag == "--norm-epsilon" and fields["layernorm_epsilon"].kind == "float"
    assert fields["add_bias_linear"].flag == "--disable-bias-linear" and fields["add_bias_linear"].switch_to is False
    assert fields["moe_router_dtype"].choices == ("fp32", "fp64")
    assert fields["moe_aux_loss_coeff"].is_list and "timers" not in fields


def test_two_fields_may_declare_one_flag(monkeypatch):
    """As fp4_param and fp4_param_gather do from megatron-core 0.17 on."""
    twins = {name: MegatronField(name, "--of-both", "bool", False, "") for name in ("one", "other")}
    monkeypatch.setattr(miles.config.megatron.fields, "megatron_fields", lambda: twins)
    parser = argparse.ArgumentParser()
    added = add_megatron_flags(parser.add_argument_group(), taken=set())
    assert [field.name for field in added if field.flag == "--of-both"] == ["one"]
    assert vars(parser.parse_args(["--of-both"]))[DESTINATION + "one"] is True

"""A new entry in a registry is one in the settings, and wherever else its name stands."""

import typing

import pytest

from compress.align.preference import PREFERENCE_LOSSES
from compress.align.settings import OWN, Align
from compress.distill.settings import Distill
from compress.distill.strategies import STRATEGIES
from compress.distill.temperature import SCHEDULES
from compress.keys import keys, kind_of
from compress.models import MODELS
from compress.quantize.quantizers import QUANTIZERS
from compress.quantize.settings import Quantize
from compress.settings import Export
from compress.train.divergences import DIVERGENCES
from eval.gate import BUILT_IN, Policy
from eval.metrics import METRICS
from export import FORMATS
from export.card import LOADING
from export.gguf_names import MODEL_TYPES
from export.peft import SCALINGS


def choices(schema: type, name: str) -> set[str]:
    """What a key may be set to; of a list, what each item may be."""
    kind = kind_of(keys(schema)[name].hint)
    return set(typing.get_args(typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind))


@pytest.mark.parametrize(
    ("schema", "name", "registry"),
    [
        (Distill, "divergence", {*DIVERGENCES}),
        (Distill, "temperature_schedule", {*SCHEDULES}),
        *[(Distill, f"{name}_loss", {*strategy.losses}) for name, strategy in STRATEGIES.items()],
        (Align, "method", {*PREFERENCE_LOSSES, "sft"}),
        (Distill, "scaling", {*SCALINGS}),
        (Align, "scaling", {*SCALINGS}),
        (Quantize, "method", {*QUANTIZERS}),
        (Align, "base", {name for name, quantizer in QUANTIZERS.items() if not quantizer.calibrated}),
        (Export, "format", {*FORMATS}),
    ],
)
def test_a_key_of_the_settings_may_name_every_entry_of_its_registry_and_no_other(schema, name, registry):
    assert choices(schema, name) == registry


def test_every_method_of_align_says_which_keys_are_its_own():
    assert OWN.keys() == choices(Align, "method")


def test_every_strategy_has_a_weight_that_leaves_it_out_by_default():
    assert {name: keys(Distill)[name].default for name in STRATEGIES} == dict.fromkeys(STRATEGIES, 0.0)


def test_every_format_says_how_it_is_loaded():
    assert LOADING.keys() == FORMATS.keys()


def test_every_family_has_names_in_gguf():
    assert MODEL_TYPES.keys() == MODELS.keys()


def test_the_built_in_policy_bounds_metrics_that_exist():
    assert {rule.metric for rule in Policy.from_toml(BUILT_IN).rules} <= METRICS.keys()

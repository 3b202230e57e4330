"""What a config.json means, and that a wrong one is refused in one line, whatever is wrong with it."""

import copy
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.models import read_config
from compress.models.config import Rope
from export.errors import ArtifactError
from tests.tiny_models import RECORDS

LLAMA3 = RECORDS["llama-llama3"]["config"]["rope_scaling"]


def changed(case: str, **fields) -> dict:
    return copy.deepcopy(RECORDS[case]["config"]) | fields


def without(case: str, *names: str) -> dict:
    return {name: value for name, value in RECORDS[case]["config"].items() if name not in names}


WRONG = {
    "unknown model_type": (changed("llama", model_type="gpt2"), "model_type 'gpt2'"),
    "no model_type": (without("llama", "model_type"), "model_type None"),
    "model_type of another kind": (changed("llama", model_type=["llama"]), "model_type"),
    "missing fields, all at once": (without("qwen3", "vocab_size", "hidden_size"), "no vocab_size, hidden_size"),
    "null field": (changed("llama", intermediate_size=None), "no intermediate_size"),
    "bool as int": (changed("llama", num_hidden_layers=True), "num_hidden_layers = True"),
    "float as int": (changed("llama", hidden_size=48.0), "hidden_size = 48.0"),
    "text as int": (changed("gemma3", num_hidden_layers="4"), "num_hidden_layers = '4'"),
    "negative size": (changed("llama", intermediate_size=-80), "intermediate_size = -80"),
    "no heads": (changed("llama", num_attention_heads=0), "num_attention_heads = 0"),
    "no key heads": (changed("llama", num_key_value_heads=0), "num_key_value_heads = 0"),
    "size beyond memory": (changed("llama", vocab_size=1 << 40), "vocab_size"),
    "depth beyond memory": (changed("gemma2", num_hidden_layers=1 << 40), "num_hidden_layers"),
    "key heads that don't divide": (changed("llama", num_key_value_heads=3), "not a multiple of 3"),
    "odd head": (changed("llama", head_dim=15), "head_dim = 15"),
    "more heads than hidden units": (changed("qwen2", num_attention_heads=64), "head_dim = 0"),
    "other activation": (changed("llama", hidden_act="relu"), "activation 'relu'"),
    "text as bool": (changed("llama", attention_bias="false"), "attention_bias = 'false'"),
    "number as bool": (changed("llama", tie_word_embeddings=1), "tie_word_embeddings = 1"),
    "epsilon that is not a number": (changed("llama", rms_norm_eps=math.nan), "rms_norm_eps = nan"),
    "epsilon of zero": (changed("llama", rms_norm_eps=0.0), "rms_norm_eps = 0.0"),
    "negative theta": (changed("llama", rope_theta=-1.0), "rope_theta = -1.0"),
    "infinite theta": (changed("llama", rope_theta=math.inf), "rope_theta = inf"),
    "RoPE factor that is not a number": (changed("llama", rope_scaling=LLAMA3 | {"factor": math.nan}), "factor = nan"),
    "RoPE factor as text": (changed("llama", rope_scaling=LLAMA3 | {"factor": "8"}), "factor = '8'"),
    "no RoPE factor": (changed("llama", rope_scaling={"rope_type": "linear"}), "factor = None"),
    "RoPE bands that cross": (changed("llama", rope_scaling=LLAMA3 | {"high_freq_factor": 1.0}), "less than high"),
    "RoPE that isn't built": (changed("llama", rope_scaling={"rope_type": "yarn", "factor": 4.0}), "'yarn'"),
    "RoPE that isn't a table": (changed("llama", rope_parameters=[1.0]), "rope_parameters = [1.0]"),
    "heads rotated in part": (changed("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
    "negative window": (changed("mistral", sliding_window=-7), "sliding_window = -7"),
    "layer_types of another length": (changed("qwen3-sliding", num_hidden_layers=5), "must name 5 layers"),
    "layer_types of another kind": (changed("gemma3-scaled", layer_types=["chunked_attention"] * 4), "layer_types"),
    "layer_types that is no list": (changed("gemma3-scaled", layer_types=4), "layer_types"),
    "pattern of no length": (changed("gemma3", sliding_window_pattern=-1), "sliding_window_pattern = -1"),
    "text as layer": (changed("qwen2-sliding", max_window_layers="2"), "max_window_layers = '2'"),
    "soft cap of zero": (changed("gemma2", attn_logit_softcapping=0.0), "attn_logit_softcapping = 0.0"),
    "query scale of zero": (changed("gemma2", query_pre_attn_scalar=0), "query_pre_attn_scalar = 0"),
    "attention both ways": (changed("gemma3", use_bidirectional_attention=True), "use_bidirectional_attention"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_config_is_refused_in_one_line_that_says_where(what):
    config, words = WRONG[what]
    with pytest.raises(ArtifactError) as refusal:
        read_config(config)
    message = str(refusal.value)
    assert message.startswith("config.json: ")
    assert words in message
    assert "\n" not in message


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_anything_anywhere_is_read_or_refused_in_one_line(data):
    config = copy.deepcopy(RECORDS[data.draw(st.sampled_from(sorted(RECORDS)))]["written"])
    inside = [table for name in ("rope_parameters",) for table in (config[name], *config[name].values())]
    table = data.draw(st.sampled_from([config, config, *(t for t in inside if isinstance(t, dict))]))
    table[data.draw(st.sampled_from(sorted(table)))] = data.draw(anything)
    try:
        read = read_config(config)
    except ArtifactError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert hash(read) == hash(read_config(config))
        assert len(read.windows) == len(read.frequencies) == read.num_hidden_layers
        assert np.isfinite(read.frequencies).all()
    assert "\n" not in refusal


def test_what_config_json_leaves_out_is_what_the_family_means():
    """The defaults of transformers' config classes, which config.json may omit."""
    bare = dict.fromkeys(("vocab_size", "intermediate_size", "num_attention_heads"), 32)
    bare |= {"hidden_size": 64, "num_hidden_layers": 3}
    found = {}
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"):
        config = read_config(bare | {"model_type": family})
        shown = (config.num_key_value_heads, config.head_dim, config.tie_word_embeddings, config.rope.theta)
        found[family] = (*shown, config.windows)
    assert found == {
        "llama": (32, 2, False, 1e4, (None, None, None)),
        "mistral": (8, 2, False, 1e4, (4096, 4096, 4096)),
        "qwen2": (32, 2, False, 1e4, (None, None, None)),
        "qwen3": (32, 128, False, 1e4, (None, None, None)),
        "gemma2": (4, 256, True, 1e4, (4096, None, 4096)),
        "gemma3_text": (4, 256, True, 1e6, (4096, 4096, 4096)),
    }


def test_llama_and_unasked_qwen_never_slide():
    assert read_config(changed("llama", sliding_window=4)).windows == (None,) * 4
    assert read_config(changed("qwen3-sliding", use_sliding_window=False)).windows == (None,) * 4


def test_scaled_rope_without_an_original_length_takes_the_models():
    scaling = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
    config = read_config(changed("llama", rope_scaling=scaling, max_position_embeddings=64))
    assert config == read_config(changed("llama", rope_scaling=LLAMA3, max_position_embeddings=64))


def test_llama3_keeps_short_waves_and_divides_long_ones():
    plain = Rope(theta=500_000.0).frequencies(64)
    scaled = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192.0).frequencies(64)
    waves = 2 * np.pi / plain
    short, long = waves < 8192 / 4, waves > 8192
    assert short.any()
    assert long.any()
    assert not (short | long).all()
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8, rtol=1e-6)
    between = ~(short | long)
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()

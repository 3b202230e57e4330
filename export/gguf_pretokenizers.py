"""How text is cut into words before byte-pair merges: `tokenizer.ggml.pre` and tokenizer.json's `pre_tokenizer`.

A GGUF file names the rule only; the rule itself lives in llama.cpp (src/llama-vocab.cpp) and, as it was trained, in the
model's original tokenizer.json. Here is the original form of those that this project's families use.
"""

import dataclasses
from typing import Any

from export.errors import ArtifactError

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA_3 = _WORDS + r"\p{N}{1,3}|" + _TAIL
QWEN_2 = _WORDS + r"\p{N}|" + _TAIL
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """A rule: the steps before ByteLevel, and whether ByteLevel itself splits by GPT-2's expression.

    Attributes:
      steps: each ("digits",) for one digit at a time, or ("split", expression).
      byte_level_splits: ByteLevel's `use_regex`.
      normalizer: NFC or none. llama.cpp normalizes nothing.
      ignore_merges: whether a word that is a token is taken whole.
      add_bos: llama.cpp's default where the file does not say.
    """

    steps: tuple[tuple[str, ...], ...] = ()
    byte_level_splits: bool = True
    normalizer: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _split(*expressions: str) -> tuple[tuple[str, ...], ...]:
    return tuple(("split", expression) for expression in expressions)


_LLAMA_3 = PreTokenizer(_split(LLAMA_3), byte_level_splits=False, ignore_merges=True, add_bos=True)
_QWEN_2 = PreTokenizer(_split(QWEN_2), byte_level_splits=False, normalizer="NFC")
_DIGITS = PreTokenizer((("digits",),))
_GPT_2 = PreTokenizer()
# What llama.cpp does where a converter did not recognise the tokenizer.
_DEFAULT = PreTokenizer(_split(r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"), byte_level_splits=False)

# The first name of a rule is the one that is written.
PRE_TOKENIZERS = {
    "gpt-2": _GPT_2,
    "phi-2": _GPT_2,
    "olmo": _GPT_2,
    "mpt": _GPT_2,
    "jais": _GPT_2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "megrez": _QWEN_2,
    "stablelm2": dataclasses.replace(_QWEN_2, normalizer=None),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "smaug-bpe": dataclasses.replace(_LLAMA_3, ignore_merges=False, add_bos=False),
    "dbrx": dataclasses.replace(_LLAMA_3, ignore_merges=False, add_bos=False),
    "default": _DEFAULT,
}


def to_json(rule: PreTokenizer) -> dict[str, Any]:
    """tokenizer.json's `pre_tokenizer` of a rule."""
    last = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": rule.byte_level_splits,
        "use_regex": rule.byte_level_splits,
    }
    if not rule.steps:
        return last
    return {"type": "Sequence", "pretokenizers": [*map(_step_to_json, rule.steps), last]}


def _step_to_json(step: tuple[str, ...]) -> dict[str, Any]:
    if step == ("digits",):
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": step[1]}, "behavior": "Isolated", "invert": False}


def name_of(tokenizer: dict[str, Any]) -> str:
    """The name `tokenizer.ggml.pre` of a byte-level tokenizer.json.

    Raises:
      ArtifactError: llama.cpp knows no rule that cuts text as this tokenizer does.
    """
    rule = _from_json(tokenizer)
    for name, known in PRE_TOKENIZERS.items():
        if dataclasses.replace(known, add_bos=rule.add_bos) == rule:
            return name
    steps = [step["type"] for step in _flat(tokenizer.get("pre_tokenizer"))]
    raise ArtifactError(
        f"tokenizer.json: no GGUF pre-tokenizer equals {' + '.join(steps)} with normalizer {rule.normalizer} and "
        f"ignore_merges {rule.ignore_merges}; those known are {', '.join(PRE_TOKENIZERS)}"
    )


def _from_json(tokenizer: dict[str, Any]) -> PreTokenizer:
    steps = _flat(tokenizer.get("pre_tokenizer"))
    level = steps[-1] if steps else {}
    if level.get("type") != "ByteLevel" or level.get("add_prefix_space", True):
        raise ArtifactError(
            "tokenizer.json: a byte-level tokenizer's last pre-tokenizer must be ByteLevel without a prefix space"
        )
    found: list[tuple[str, ...]] = []
    for step in steps[:-1]:
        pattern = step.get("pattern")
        expression = pattern.get("Regex") if isinstance(pattern, dict) else None
        if step.get("type") == "Digits" and step.get("individual_digits"):
            found.append(("digits",))
        elif step.get("type") == "Split" and expression and step.get("behavior") == "Isolated":
            found.append(("split", expression))
        else:
            raise ArtifactError(f"tokenizer.json: the pre-tokenizer {step.get('type')} has no form in GGUF here")
    normalizer = tokenizer.get("normalizer") or {}
    return PreTokenizer(
        tuple(found),
        bool(level.get("use_regex", True)),
        normalizer.get("type"),
        bool(tokenizer["model"].get("ignore_merges", False)),
    )


def _flat(step: Any) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer in order, nested sequences opened."""
    if not isinstance(step, dict):
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [inner for part in step.get("pretokenizers", []) for inner in _flat(part)]

"""A GGUF file's vocabulary as tokenizer.json and its companions, and back, with the same token ids.

Two kinds: "gpt2", byte-level BPE with merges, and "llama", SentencePiece BPE whose merges are implied by scores.
"""

import json
import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from export.errors import ArtifactError
from export.gguf_header import Header
from export.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer, name_of, to_json
from export.untrusted import parse_object

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"  # SentencePiece's mark for a space
PADDING = re.compile(r"\[PAD\d+\]")
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
_KEY = "tokenizer.ggml."
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def read_vocabulary(header: Header, vocab_size: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The tokenizer files of a GGUF file, and the ids for its config.json; neither where it has no vocabulary.

    Raises:
      ArtifactError: the vocabulary's kind or pre-tokenizer is unknown, or it contradicts itself.
    """
    kind = header.text(_KEY + "model", "none")
    if kind in ("none", "no_vocab"):
        return {}, {}
    if kind not in ("gpt2", "llama"):
        raise ArtifactError(f"{header.path}: tokenizer {kind[:40]!r} is not supported; gpt2 and llama are")
    tokens = header.texts(_KEY + "tokens")
    if not 0 < len(tokens) <= vocab_size:
        raise ArtifactError(f"{header.path}: {len(tokens)} tokens for an embedding of {vocab_size} rows")
    types = [int(kind) for kind in header.numbers(_KEY + "token_type", len(tokens), NORMAL)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise ArtifactError(f"{header.path}: the token {twice[:40]!r} has two ids")
    padding = [t for t, kind in zip(tokens, types, strict=True) if kind == UNUSED and PADDING.fullmatch(t)]
    for token in padding:
        del vocabulary[token]
    ids = _read_ids(header, kind, len(tokens))
    special = {role: tokens[i] for role, i in ids.items()}
    rule = None if kind == "llama" else _rule(header)
    ends = {
        "bos": header.flag(_KEY + "add_bos_token", rule is None or rule.add_bos),
        "eos": header.flag(_KEY + "add_eos_token", False),
    }
    if rule is None:
        tokenizer = _sentencepiece(header, tokens, vocabulary, types)
    else:
        tokenizer = _byte_level(header, rule, vocabulary)
    tokenizer["added_tokens"] = [
        _added(i, token, special=types[i] != USER_DEFINED)
        for token, i in vocabulary.items()
        if types[i] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    template = _template({role: (token, ids[role]) for role, token in special.items() if ends.get(role)})
    tokenizer["post_processor"] = _joined(tokenizer["post_processor"], template)
    return _files(header, tokenizer, special, ends, ids, tokens, types), _config_ids(ids)


def _read_ids(header: Header, kind: str, count: int) -> dict[str, int]:
    """The ids of bos, eos, unk and pad, of those that there are."""
    defaults = {"bos": 1, "eos": 2, "unk": 0} if kind == "llama" and count > 2 else {}
    found = {}
    for role, key in _ROLES.items():
        if _KEY + key in header.fields or role in defaults:
            number = header.integer(_KEY + key, defaults.get(role), high=2**32 - 1)
            if number < count:
                found[role] = number
    return found


def _rule(header: Header) -> PreTokenizer:
    name = header.text(_KEY + "pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ArtifactError(f"{header.path}: pre-tokenizer {name[:40]!r} is not supported; {known} are")
    return PRE_TOKENIZERS[name]


def _byte_level(header: Header, rule: PreTokenizer, vocabulary: dict[str, int]) -> dict[str, Any]:
    merges = []
    for line in header.texts(_KEY + "merges"):
        at = line.find(" ", 1)
        left, right = line[:at], line[at + 1 :]
        if at < 0 or not {left, right, left + right} <= vocabulary.keys():
            raise ArtifactError(f"{header.path}: the merge {line[:40]!r} is of tokens that the vocabulary lacks")
        merges.append((left, right))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = _bpe(vocabulary, merges) | {"ignore_merges": rule.ignore_merges}
    normalizer = None if rule.normalizer is None else {"type": rule.normalizer}
    return _tokenizer(model, normalizer, to_json(rule), level, level)


def _sentencepiece(header: Header, tokens: list[str], vocabulary: dict[str, int], types: list[int]) -> dict[str, Any]:
    scores = header.numbers(_KEY + "scores", len(tokens), 0.0)
    unknown = tokens[header.integer(_KEY + "unknown_token_id", 0, high=len(tokens) - 1)]
    model = _bpe(vocabulary, merges_from_scores(vocabulary, scores))
    model |= {"unk_token": unknown, "fuse_unk": True, "byte_fallback": BYTE in types}
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    unmark = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [unmark, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if not header.flag(_KEY + "add_space_prefix", True):
        return _tokenizer(model, mark, None, None, {"type": "Sequence", "decoders": decoders})
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, mark]}
    decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(model, normalizer, None, None, {"type": "Sequence", "decoders": decoders})


def merges_from_scores(vocabulary: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """The merges that scores imply: of all pairs that make a token, the one with the best token first.

    SentencePiece joins any two neighbours whose concatenation is a token, best score first, leftmost among equals.
    Two pairs that make the same token can compete only where text repeats itself, as in "aaa"; merging from the left
    leaves the longer part on the left, so that pair goes first.
    """
    order = np.argsort(-scores, kind="stable").tolist()
    tokens = {i: token for token, i in vocabulary.items()}
    return [
        (token[:cut], token[cut:])
        for token in map(tokens.get, order)
        if token is not None
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _tokenizer(model: dict, normalizer: dict | None, pre: dict | None, post: dict | None, decoder: dict) -> dict:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre,
        "post_processor": post,
        "decoder": decoder,
        "model": model,
    }


def _added(number: int, token: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": token, **flags, "special": special}


def _template(ends: dict[str, tuple[str, int]]) -> dict[str, Any] | None:
    """A post-processor that puts bos before a text and eos after it, of those given."""
    if not ends:
        return None

    def around(sequence: str) -> list[dict[str, Any]]:
        parts = [{"Sequence": {"id": sequence, "type_id": 0}}]
        if "bos" in ends:
            parts.insert(0, {"SpecialToken": {"id": ends["bos"][0], "type_id": 0}})
        if "eos" in ends:
            parts.append({"SpecialToken": {"id": ends["eos"][0], "type_id": 0}})
        return parts

    special = {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in ends.values()}
    pair = around("A") + around("B")
    return {"type": "TemplateProcessing", "single": around("A"), "pair": pair, "special_tokens": special}


def _joined(first: dict | None, second: dict | None) -> dict | None:
    if first and second:
        return {"type": "Sequence", "processors": [first, second]}
    return first or second


def _files(header: Header, tokenizer: dict, special: dict, ends: dict, ids: dict, tokens: list, types) -> dict:
    chat = header.fields.get("tokenizer.chat_template")
    chat = chat if isinstance(chat, str) else ""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": ends["bos"],
        "add_eos_token": ends["eos"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
        **{f"{role}_token": token for role, token in special.items()},
    }
    generation = _config_ids(ids)
    stops = [ids["eos"]] if "eos" in ids else []
    eot = header.integer(_KEY + "eot_token_id", -1, low=-1, high=2**32 - 1)
    stops += [eot] if 0 <= eot < len(tokens) else []
    # llama.cpp stops at these whatever the file says; the templates that use them rely on it.
    stops += [i for i, t in enumerate(tokens) if t in END_OF_TURN and types[i] == CONTROL and t in chat]
    if stops:
        stops = list(dict.fromkeys(stops))
        generation["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config, "generation_config.json": generation}
    found = {name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()}
    if chat:
        found["chat_template.jinja"] = chat.encode()
    return found


def _config_ids(ids: dict[str, int]) -> dict[str, Any]:
    return {f"{role}_token_id": ids[role] for role in ("bos", "eos", "pad") if role in ids}


# Writing


def write_vocabulary(files: dict[str, bytes], config: dict[str, Any]) -> dict[str, Any]:
    """The keys `tokenizer.…` that stand for the tokenizer files; of a model without any, that there is none.

    Raises:
      ArtifactError: the tokenizer has no form in GGUF that gives the same token ids.
    """
    if "tokenizer.json" not in files:
        if "tokenizer.model" in files:
            raise ArtifactError("tokenizer.model: GGUF is written from tokenizer.json, which is missing; convert it")
        return {_KEY + "model": "none"}
    tokenizer = _loaded(files["tokenizer.json"])
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise ArtifactError(f"tokenizer.json: a {model['type']} model has no form in GGUF here; BPE has")
    settings = parse_object(files.get("special_tokens_map.json", b"{}"), "special_tokens_map.json")
    given = parse_object(files.get("tokenizer_config.json", b"{}"), "tokenizer_config.json")
    settings |= {name: value for name, value in given.items() if value is not None}
    generation = parse_object(files.get("generation_config.json", b"{}"), "generation_config.json")
    added = tokenizer["added_tokens"]
    vocabulary = model["vocab"] | {token["content"]: token["id"] for token in added}
    merges = model["merges"]
    spaced = _is_sentencepiece(tokenizer)
    keys = _token_keys(vocabulary, added, config["vocab_size"], spaced)
    if spaced:
        keys |= _sentencepiece_keys(tokenizer, model["vocab"], merges, keys[_KEY + "tokens"])
    else:
        if not merges:
            raise ArtifactError("tokenizer.json: no merges; llama.cpp needs at least one")
        keys |= {_KEY + "model": "gpt2", _KEY + "pre": name_of(tokenizer)}
        keys |= {_KEY + "merges": [f"{left} {right}" for left, right in merges], _KEY + "add_space_prefix": False}
    keys |= _role_keys(tokenizer, settings, generation, config, vocabulary)
    template = _chat_template(files, settings)
    if template:
        keys["tokenizer.chat_template"] = template
    return keys


def _loaded(text: bytes) -> dict[str, Any]:
    """tokenizer.json in the one form that the tokenizers library writes, so that nothing in it is left to doubt."""
    parse_object(text, "tokenizer.json")
    try:
        return json.loads(Tokenizer.from_str(text.decode("utf-8")).to_str())
    except Exception as error:  # the library raises bare Exception
        raise ArtifactError(f"tokenizer.json: cannot be read: {str(error).splitlines()[0]}") from None


def _is_sentencepiece(tokenizer: dict[str, Any]) -> bool:
    steps = json.dumps([tokenizer.get("pre_tokenizer"), tokenizer.get("normalizer")], ensure_ascii=False)
    return SPACE in steps and '"ByteLevel"' not in steps


def _token_keys(vocabulary: dict[str, int], added: list[dict], size: int, spaced: bool) -> dict[str, Any]:
    highest = max(vocabulary.values(), default=-1)
    if highest >= size:
        raise ArtifactError(f"tokenizer.json: the id {highest} is beyond the model's vocabulary of {size}")
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [UNUSED] * size
    for token, i in vocabulary.items():
        tokens[i] = token
        types[i] = BYTE if spaced and BYTE_TOKEN.fullmatch(token) else NORMAL
    for entry in added:
        i = entry["id"]
        types[i] = CONTROL if entry["special"] else USER_DEFINED
        if spaced and types[i] == USER_DEFINED:
            tokens[i] = tokens[i].replace(SPACE, " ")  # llama.cpp looks for these in the text before it marks spaces
    if len(set(tokens)) < size:
        raise ArtifactError("tokenizer.json: two ids would have the same token in GGUF")
    return {_KEY + "tokens": tokens, _KEY + "token_type": types}


def _sentencepiece_keys(tokenizer: dict, pieces: dict[str, int], merges: list, tokens: list[str]) -> dict[str, Any]:
    """Scores by the rank of the first merge that makes a token, checked to imply the tokenizer's own merges."""
    lowest = -float(len(tokens) + len(merges))
    scores = [lowest] * len(tokens)
    seen: set[str] = set()
    for left, right in merges:
        if left + right not in seen:
            scores[pieces[left + right]] = -float(len(seen))
            seen.add(left + right)
    wanted = {(left, right) for left, right in merges}
    implied = {(left, right) for left, right in merges_from_scores(pieces, np.array(scores))}
    odd = next(iter(sorted(implied - wanted)), None)
    if odd is not None:
        raise ArtifactError(
            f"tokenizer.json: llama.cpp would merge {odd[0]!r} and {odd[1]!r}, which this tokenizer does not; "
            "only tokenizers converted from SentencePiece have a form in GGUF"
        )
    return {
        _KEY + "model": "llama",
        _KEY + "pre": "default",
        _KEY + "scores": scores,
        _KEY + "add_space_prefix": _space_prefix(tokenizer),
    }


def _space_prefix(tokenizer: dict[str, Any]) -> bool:
    """Whether a text gets a space before it.

    Raises:
      ArtifactError: the normalizer or pre-tokenizer does more than marking spaces.
    """
    normalizer, pre = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", []) if normalizer.get("type") == "Sequence" else [normalizer]
    kinds = [step.get("type") for step in steps if step]
    marks = kinds[-1:] == ["Replace"] and steps[-1].get("content") == SPACE
    if pre.get("type") == "Metaspace" and not kinds and not pre.get("split", True):
        return pre.get("prepend_scheme", "always") != "never"
    # Gemma's Split at spaces never finds one: they are marked by then.
    harmless = not pre or (pre.get("type") == "Split" and pre.get("pattern") == {"String": " "})
    if marks and harmless and kinds in (["Replace"], ["Prepend", "Replace"]):
        return kinds[0] == "Prepend"
    raise ArtifactError(
        f"tokenizer.json: normalizer {kinds or None} with pre-tokenizer {pre.get('type')} has no form in GGUF; "
        "Replace, Prepend + Replace and Metaspace without split have"
    )


def _role_keys(tokenizer: dict, settings: dict, generation: dict, config: dict, vocabulary: dict) -> dict[str, Any]:
    ids = {}
    for role in _ROLES:
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if role == "unk" and token is None:
            token = tokenizer["model"].get("unk_token")
        number = vocabulary.get(token) if isinstance(token, str) else None
        for source in (config, generation):
            if number is None:
                given = source.get(f"{role}_token_id")
                number = given[0] if isinstance(given, list) and given else given
        if isinstance(number, int) and 0 <= number < config["vocab_size"]:
            ids[role] = number
    keys: dict[str, Any] = {_KEY + _ROLES[role]: number for role, number in ids.items()}
    stops = generation.get("eos_token_id")
    size = config["vocab_size"]
    others = [i for i in stops if i in range(size) and i != ids.get("eos")] if isinstance(stops, list) else []
    if others:
        keys[_KEY + "eot_token_id"] = others[0]
    for role, at in (("bos", 0), ("eos", -1)):
        flag = settings.get(f"add_{role}_token")
        keys[f"{_KEY}add_{role}_token"] = flag if isinstance(flag, bool) else _puts(tokenizer, at)
    return keys


def _puts(tokenizer: dict[str, Any], at: int) -> bool:
    """Whether the post-processor puts a special token at the start (`at` 0) or the end (-1) of a text."""
    post = tokenizer.get("post_processor") or {}
    parts = post.get("processors", []) if post.get("type") == "Sequence" else [post]
    templates = [part["single"] for part in parts if part.get("type") == "TemplateProcessing" and part.get("single")]
    return any("SpecialToken" in template[at] for template in templates)


def _chat_template(files: dict[str, bytes], settings: dict[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArtifactError(f"chat_template.jinja: not UTF-8 ({error.reason})") from error
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        by_name = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = by_name.get("default")
    return found if isinstance(found, str) else None

"""tokenizer.model (SentencePiece, BPE) rebuilt as a `tokenizers` tokenizer, so that everything above knows one kind.

The file is a protobuf (https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto) from
strangers; the few fields that matter are read here, each length checked against the bytes that are there.
"""

import struct
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from export.errors import ArtifactError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # SentencePiece.Type
BPE = 2  # TrainerSpec.ModelType
MAX_PIECES = 1 << 21
SPACE = "\u2581"


def tokenizer_from_model(data: bytes) -> tuple[tokenizers.Tokenizer, dict[str, object]]:
    """The tokenizer, and what tokenizer_config.json would say: its special tokens by name, and `add_bos_token`.

    Raises:
      ArtifactError: the file is cut off or not SentencePiece, or its model is not BPE.
    """
    pieces, trainer, normalizer = _read(data)
    if trainer.get(3, 1) != BPE:
        raise ArtifactError(
            "tokenizer.model: only SentencePiece models of type BPE are read; "
            "save a tokenizer.json with transformers and put it beside the weights"
        )
    vocabulary = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    unknown = next((piece for piece, _, kind in pieces if kind == UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(pieces, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=any(kind == BYTE for _, _, kind in pieces),
        )
    )
    backend.normalizer = _normalizer(normalizer)
    dummy_prefix = bool(normalizer.get(3, 1))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * dummy_prefix)
    for piece, _, kind in pieces:
        if kind in (CONTROL, UNKNOWN):
            backend.add_special_tokens([AddedToken(piece, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            backend.add_tokens([AddedToken(piece, normalized=False, special=False)])
    return backend, _names(pieces, trainer)


def _names(pieces: list, trainer: dict) -> dict[str, object]:
    names: dict[str, object] = {"add_bos_token": True}  # what the models that ship only tokenizer.model expect
    for kind, field, default in (("bos", 41, 1), ("eos", 42, 2), ("pad", 43, -1)):
        i = trainer.get(field, default)
        if isinstance(i, int) and 0 <= i < len(pieces) and pieces[i][2] == CONTROL:
            names[f"{kind}_token"] = pieces[i][0]
    return names


def _merges(pieces: list, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece; the better its score, the earlier it merges."""
    found = []
    for piece, score, kind in pieces:
        if kind not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _normalizer(spec: dict) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.get(2):
        try:
            steps.append(normalizers.Precompiled(spec[2]))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"tokenizer.model: its normalization table cannot be read: {error}") from None
    if spec.get(4, 1):
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    if spec.get(3, 1):
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _read(data: bytes) -> tuple[list[tuple[str, float, int]], dict, dict]:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict = {}
    normalizer: dict = {}
    try:
        for field, value in _fields(data):
            if field == 1:
                piece = dict(_fields(value))
                pieces.append((piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0], piece.get(3, NORMAL)))
                if len(pieces) > MAX_PIECES:
                    raise ValueError(f"more than {MAX_PIECES} pieces")
            elif field == 2:
                trainer = dict(_fields(value))
            elif field == 3:
                normalizer = dict(_fields(value))
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ArtifactError(f"tokenizer.model: not a SentencePiece model: {error}") from None
    if not pieces:
        raise ArtifactError("tokenizer.model: holds no pieces; is the file whole?")
    return pieces, trainer, normalizer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protobuf message: an int for a varint, bytes for the rest."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if size > len(data) - at:
            raise ValueError(f"{size} bytes announced at byte {at}, {len(data) - at} left")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("cut off in a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            # int32 fields hold negative numbers as 64-bit two's complement
            return (value - (1 << 64) if value >= 1 << 63 else value), at
    raise ValueError("a number of more than 10 bytes")

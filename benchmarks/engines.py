"""Other engines' logits, and how far two programs agree on the same tokens.

Needs what `make test-readers` installs; the scripts that use it are run by `.venv-readers/bin/python`.

Letters: T tokens of a window, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from compress.data.windows import Windows
from compress.evaluate import Runner
from compress.models.folder import Model
from eval import divergence
from eval.perplexity import perplexity
from eval.scores import Chunk, score

OURS, THEIRS = "compress", "engine"
CHUNK = 256

Engine = Callable[[np.ndarray], np.ndarray]
"""Token ids [T] to logits [T, V]."""


def llama_cpp(path: Path, window: int) -> Engine:
    """llama.cpp on a GGUF file, with keys and values in float32; each call starts with an empty cache."""
    import llama_cpp as library

    kind = library.GGML_TYPE_F32
    options = {"logits_all": True, "type_k": kind, "type_v": kind, "verbose": False}
    model = library.Llama(str(path), n_ctx=window, n_batch=window, n_ubatch=window, **options)

    def run(tokens: np.ndarray) -> np.ndarray:
        model.reset()
        model.eval(tokens.tolist())
        return np.array(model.scores[: len(tokens)], np.float32)

    return run


def llama_cpp_ids(path: Path, text: str) -> list[int]:
    """Token ids that llama.cpp gives a text, without BOS and with special tokens spelled out."""
    import llama_cpp as library

    model = library.Llama(str(path), vocab_only=True, verbose=False)
    return model.tokenize(text.encode(), add_bos=False, special=False)


def transformers(folder: Path) -> Engine:
    """The library transformers on a model folder, computing in float32."""
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    from export.checkpoint import read
    from export.quantized import QuantizedTensor

    weights = read(folder).weights
    zeros = any(isinstance(w, QuantizedTensor) and not w.spec.symmetric for w in (weights[name] for name in weights))
    # It reads zero points only when it dequantizes.
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if zeros else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()

    def run(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(tokens[None].astype(np.int64))).logits[0].float().numpy()

    return run


@dataclasses.dataclass(frozen=True)
class Agreement:
    """KL(engine || compress) a token in nats, the share of tokens that both rank first, and both perplexities."""

    kl: float
    top1: float
    perplexity: float
    engine_perplexity: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"top-1 agreement {self.top1:.4%}, mean KL {self.kl:.3g} nats over {self.tokens:,} tokens; "
            f"perplexity {self.perplexity:.5f}, the engine's {self.engine_perplexity:.5f}"
        )


def agreement(model: Model, engine: Engine, held_out: Windows) -> Agreement:
    """Run both on every window and compare what they predict."""
    runner = Runner(model, np.float32)

    def chunks():
        for batch, owners in held_out:
            ours = np.asarray(runner.hidden(batch)).reshape(len(batch.tokens), -1, model.config.hidden_size)
            for row, hidden in enumerate(ours):
                length = int((np.asarray(batch.segments[row]) > 0).sum())
                if length < 2:
                    continue
                theirs = engine(np.asarray(batch.tokens[row, :length]))
                for at in range(0, length - 1, CHUNK):
                    end = min(at + CHUNK, length - 1)
                    logits = {OURS: runner.logits(jax.numpy.asarray(hidden[at:end])), THEIRS: theirs[at:end]}
                    target = slice(at + 1, end + 1)
                    yield Chunk(logits, *(x[row, target] for x in (batch.tokens, batch.mask, owners)))

    scores = score(chunks(), [(THEIRS, OURS)])
    ours = scores[OURS]
    return Agreement(
        kl=divergence.kl_mean(ours, THEIRS).value,
        top1=divergence.top1_agreement(ours, THEIRS).value,
        perplexity=perplexity(ours).value,
        engine_perplexity=perplexity(scores[THEIRS]).value,
        tokens=ours.tokens,
    )

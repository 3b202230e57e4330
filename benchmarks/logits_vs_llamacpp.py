"""Logits of real models against llama.cpp's, on a float32 GGUF file that both read.

    .venv-readers/bin/python benchmarks/logits_vs_llamacpp.py smollm2.gguf gemma3.gguf --text held-out.txt

Each model, of any kind that compress reads, is written as GGUF in float32. llama.cpp and compress load that file and
are run on the same windows of text, in float32 on the CPU. llama.cpp's ids of the text are compared too.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from engines import agreement, llama_cpp, llama_cpp_ids

from compress.evaluate import open_windows
from compress.models.folder import load
from compress.settings import Common, Eval
from eval.metrics import CANDIDATE
from export import FORMATS

TOP1_GOAL = 0.995
KL_GOAL = 1e-4


def compare(path: Path, text: Path, *, tokens: int, window: int) -> tuple[float, float]:
    """(top-1 agreement, mean KL) of one model; prints what else there is to say."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "float32.gguf"
        FORMATS["gguf"].write(load(path).merged().dequantized().checkpoint, file, float_type="F32")
        model = load(file)
        tokenizer = model.tokenizer
        print(f"{path.name}: {model.hf['model_type']}, {model.config.num_hidden_layers} layers")
        sample = text.read_text(encoding="utf-8")[: 8 * tokens]
        ours, theirs = tokenizer.encode(sample), llama_cpp_ids(file, sample)
        same = sum(a == b for a, b in zip(ours, theirs))
        print(f"{path.name}: token ids {same:,} of {max(len(ours), len(theirs)):,} equal")
        settings = Eval(data=(text,), window=window, max_tokens=tokens, bos=tokenizer.wants_bos)
        held_out = open_windows({CANDIDATE: model}, settings, Common())
        said = held_out.convention
        print(f"{path.name}: {said.name}, {said.tokens:,} tokens of {said.data}")
        began = time.perf_counter()
        found = agreement(model, llama_cpp(file, window), held_out.windows)
        print(f"{path.name}: {found}; {time.perf_counter() - began:.0f} s for both")
    if ours != theirs:
        print(f"{path.name}: the ids differ, so the same text is not the same to both")
    return found.top1, found.kl


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files or model folders")
    parser.add_argument("--text", type=Path, required=True, help="held-out text: plain or JSONL")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of it (%(default)s)")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window (%(default)s)")
    arguments = parser.parse_args()
    options = {"tokens": arguments.tokens, "window": arguments.window}
    found = {path.stem: compare(path, arguments.text, **options) for path in arguments.models}
    for name, (top1, kl) in found.items():
        print(f"{name}, top-1 agreement with llama.cpp: {top1:.5f}, goal {TOP1_GOAL}")
        print(f"{name}, mean KL to llama.cpp in nats: {kl:.3g}, goal {KL_GOAL:g}")
    return 0 if all(top1 >= TOP1_GOAL and kl < KL_GOAL for top1, kl in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

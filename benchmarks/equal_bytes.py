"""Our GGUF against llama.cpp's Q4_K_M of the same model at no more bytes: perplexity and KL, both run by llama.cpp.

    .venv-readers/bin/python benchmarks/equal_bytes.py --model off.gguf --calibration c.txt --held-out h.txt

The model, written as GGUF in float32, is what llama.cpp quantizes, what `compress quantize` is given, and what both are
measured against. Ours is quantized as a user does it, under a budget of Q4_K_M's bytes unless other flags of the
command stand behind `--`, and exported as GGUF. Each file is loaded by llama.cpp: windows of 512 tokens of the held-out
text joined end to end, no BOS, 511 scored in each; KL is that of the float32 file's logits to the quantized one's.
"""

import argparse
import ctypes
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from engines import llama_cpp

from compress import cli
from compress.evaluate import open_windows
from compress.models.folder import Model, load
from compress.settings import Common, Eval
from eval import divergence
from eval.metrics import CANDIDATE, PARENT
from eval.perplexity import perplexity
from eval.scores import Chunk, score
from export import FORMATS

PEER, WINDOW, TOKENS = "Q4_K_M", 512, 16384
KL_GOAL = 0.5
"""Of the peer's KL, the share that ours may have."""


class Found(NamedTuple):
    """What a file takes and costs."""

    bytes: int
    perplexity: float
    kl: float


def quantize_as_peer(source: Path, out: Path) -> None:
    """llama.cpp's own quantization, without an importance matrix."""
    import llama_cpp as library

    library.llama_backend_init()
    parameters = library.llama_model_quantize_default_params()
    parameters.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{PEER}")
    code = library.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(parameters))
    if code:
        raise SystemExit(f"llama_model_quantize of {source}: exit code {code}")


def quantize_as_we_do(source: Path, folder: Path, calibration: Path, flags: list[str]) -> Path:
    """`compress quantize` and `compress export`; the GGUF file."""
    said = ["--model", str(source), "--calibration", str(calibration), "--out", str(folder / "small"), *flags]
    export = ["--model", str(folder / "small"), "--format", "gguf", "--out", str(folder / "gguf")]
    for command in (["quantize", *said], ["export", *export]):
        code = cli.main(command)
        if code:
            raise SystemExit(f"compress {' '.join(command)}: exit code {code}")
    return folder / "gguf" / "model.gguf"


def measure(model: Model, files: dict[str, Path], held_out: Path, tokens: int) -> dict[str, Found]:
    """Perplexity of each file, and its KL to that of `PARENT`, by llama.cpp."""
    settings = Eval(data=(held_out,), window=WINDOW, max_tokens=tokens)
    windows = open_windows({CANDIDATE: model}, settings, Common()).windows
    engines = {name: llama_cpp(path, WINDOW) for name, path in files.items()}

    def chunks():
        for batch, owners in windows:
            for row, owner in enumerate(owners):
                length = int((np.asarray(batch.segments[row]) > 0).sum())
                if length < 2:
                    continue
                ids = np.asarray(batch.tokens[row, :length])
                logits = {name: engine(ids)[:-1] for name, engine in engines.items()}
                yield Chunk(logits, ids[1:], np.asarray(batch.mask[row, 1:length]), owner[1:length])

    scores = score(chunks(), [(PARENT, name) for name in files if name != PARENT])
    return {
        name: Found(
            path.stat().st_size,
            perplexity(scores[name]).value,
            0.0 if name == PARENT else divergence.kl_mean(scores[name], PARENT).value,
        )
        for name, path in files.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder or GGUF file, not on a 4-bit grid")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the held-out text (%(default)s)")
    parser.add_argument("flags", nargs="*", help="of compress quantize, after --; a budget of the peer's bytes if none")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {PARENT: folder / "float32.gguf", PEER: folder / "peer.gguf"}
        FORMATS["gguf"].write(load(arguments.model).merged().dequantized().checkpoint, files[PARENT], float_type="F32")
        quantize_as_peer(files[PARENT], files[PEER])
        budget = f"{files[PEER].stat().st_size / 1e6:.6f} MB"
        chosen = ["--budget", budget, "--budget-format", "gguf", "--group-size", "32", "--asymmetric"]
        flags = arguments.flags or chosen
        files["compress"] = quantize_as_we_do(files[PARENT], folder, arguments.calibration, flags)
        found = measure(load(files[PARENT]), files, arguments.held_out, arguments.tokens)
    before, peer, ours = found[PARENT], found[PEER], found["compress"]
    for name, row in found.items():
        rise = row.perplexity / before.perplexity - 1
        print(f"{name}: {row.bytes:,} bytes, perplexity {row.perplexity:.3f} ({rise:+.2%}), KL {row.kl:.4f} nats")
    print(f"bytes as a share of {PEER}'s: {ours.bytes / peer.bytes:.4f}, goal 1")
    print(f"KL as a share of {PEER}'s: {ours.kl / peer.kl:.3f}, goal {KL_GOAL}")
    return 0 if ours.bytes <= peer.bytes and ours.kl <= KL_GOAL * peer.kl else 1


if __name__ == "__main__":
    sys.exit(main())

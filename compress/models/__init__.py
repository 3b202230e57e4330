"""Model families. A new one is a file with a config and a block, and a line here."""

from compress.models.config import DecoderConfig
from compress.models.gemma import Gemma2Config, Gemma3Config
from compress.models.llama import LlamaConfig, MistralConfig
from compress.models.qwen import Qwen2Config, Qwen3Config
from export.errors import ArtifactError

MODELS: dict[str, type[DecoderConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3Config,
}


def read_config(hf: dict) -> DecoderConfig:
    """The architecture that a config.json describes.

    Raises:
      ArtifactError: the family is unknown, or its config is not complete and consistent.
    """
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        raise ArtifactError(f"config.json: model_type {kind!r:.40} is not supported; {', '.join(MODELS)} are")
    return MODELS[kind].from_hf(hf)

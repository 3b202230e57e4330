"""The generate command."""

from typing import Any

from compress.errors import RecipeError
from compress.generate.decode import generate
from compress.generate.sampling import Sampling
from compress.models.decoder import stack
from compress.models.folder import Model, load
from compress.settings import Common, Generate


def run(settings: Generate, common: Common) -> dict[str, Any]:
    """Continue every prompt.

    Raises:
      RecipeError: a prompt that has no token.
    """
    assert settings.model is not None
    sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
    model = load(settings.model, common.dtype)
    texts = continue_texts(
        model,
        list(settings.prompt),
        max_tokens=settings.max_tokens,
        sampling=sampling,
        seed=common.seed,
        int8_cache=settings.kv_cache == "int8",
    )
    pairs = zip(settings.prompt, texts, strict=True)
    return {"generations": [{"prompt": prompt, "text": text} for prompt, text in pairs]}


def continue_texts(
    model: Model, prompts: list[str], *, max_tokens: int, sampling: Sampling, seed: int, int8_cache: bool = False
) -> list[str]:
    """The model's continuation of each text, its adapters on."""
    tokenizer = model.tokenizer
    ids = [tokenizer.with_bos(tokenizer.encode(prompt)) for prompt in prompts]
    empty = [prompt for prompt, tokens in zip(prompts, ids, strict=True) if not tokens]
    if empty:
        raise RecipeError(f"prompt {empty[0]!r} has no token; give some text")
    stacked = stack(model.config, model.merged().weights)
    options: dict[str, Any] = {"stop": sorted(tokenizer.eos_ids), "seed": seed, "int8_cache": int8_cache}
    out = generate(model.config, stacked, ids, max_tokens=max_tokens, sampling=sampling, **options)
    return [tokenizer.decode(tokens, skip_special=True) for tokens in out]

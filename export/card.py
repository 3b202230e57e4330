"""README.md of an artifact: what it is, what it was measured to be, how to load it."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

LOADING = {
    "compressed-tensors": 'vllm serve PATH\n\nAutoModelForCausalLM.from_pretrained("PATH")  # with compressed-tensors',
    "safetensors": 'AutoModelForCausalLM.from_pretrained("PATH")',
    "bitsandbytes": 'AutoModelForCausalLM.from_pretrained("PATH")  # with bitsandbytes',
    "gguf": "llama-cli -m PATH/model.gguf",
    "orbax": 'orbax.checkpoint.StandardCheckpointer().restore("/absolute/PATH/orbax")',
}


def model_card(
    title: str,
    facts: Mapping[str, Any],
    metrics: Mapping[str, Any],
    *,
    format: str,
    base_model: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """The text of a model card, with the front matter that model hubs read.

    Args:
      title: the model's name.
      facts: what it is, a line each.
      metrics: a value each, or a mapping from column to value, such as {"value": 12.1, "parent": 11.9}.
      format: a key of `FORMATS`; says how to load it.
      base_model: a name on a hub, for the front matter.
      tags: for the front matter, after the format.
    """
    # A JSON string is a YAML string.
    front = ["pipeline_tag: text-generation", f"tags: {json.dumps([format, *tags])}"]
    if base_model:
        front.append(f"base_model: {json.dumps(base_model)}")
    parts = ["---", *front, "---", "", f"# {_cell(title)}", ""]
    parts += [f"- {_cell(name)}: {_cell(value)}" for name, value in facts.items()]
    if metrics:
        parts += ["", "## Measured", "", *_table(metrics)]
    if format in LOADING:
        parts += ["", "## Load", "", "```", LOADING[format], "```"]
    parts += ["", "`manifest.json` lists every file with its SHA-256; `compress verify` checks them.", ""]
    return "\n".join(parts)


def _table(metrics: Mapping[str, Any]) -> list[str]:
    rows = {name: value if isinstance(value, Mapping) else {"value": value} for name, value in metrics.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = ["| metric | " + " | ".join(map(_cell, columns)) + " |", "|---|" + "---:|" * len(columns)]
    for name, row in rows.items():
        lines.append(f"| {_cell(name)} | " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |")
    return lines


def _cell(value: Any) -> str:
    """One line that neither Markdown nor HTML in a stranger's name can break out of."""
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("`", "'")

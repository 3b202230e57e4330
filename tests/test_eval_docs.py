"""The examples in docs/eval.md run, and docs/report.md names every key."""

import dataclasses
import re
from pathlib import Path

import pytest

from eval import report
from eval.gate import Policy
from eval.metrics import METRICS

DOCS = Path(__file__).parents[1] / "docs"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / "eval.md").read_text("utf-8"), re.S)


def test_the_examples_run_and_the_example_passes_the_built_in_policy(capsys):
    scope = {}
    exec("\n".join(blocks("python")), scope)  # one scope, as a reader would paste them
    assert scope["verdict"].exit_code == 0
    assert "0 pass: 3 of 3 rules apply and hold" in capsys.readouterr().out


def test_the_example_policy_is_one():
    (text,) = blocks("toml")
    assert Policy.from_toml(text).rules[0].requires == "distill"


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_documented(metric):
    assert f"`{metric}`" in (DOCS / "eval.md").read_text("utf-8")


def test_every_key_of_the_report_is_documented():
    text = (DOCS / "report.md").read_text("utf-8")
    kinds = [kind for kind in vars(report).values() if dataclasses.is_dataclass(kind)]
    written = [kind for kind in kinds if kind.__module__ == "eval.report"]
    assert len(written) == 12
    for kind in written:
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in text, (kind.__name__, field.name)

"""The gate as a stage: a report file and a policy file in, a verdict out."""

from pathlib import Path
from typing import Any

from compress.settings import Common, Gate
from eval.errors import EvidenceError
from eval.gate import Policy, Verdict, judge
from eval.report import from_json

MAX_BYTES = 256 << 20


def run(settings: Gate, common: Common) -> dict[str, Any]:
    """Judge the report by the policy; `exit_code` in the result is 0 on a pass, 1 on a fail, 3 if inconclusive.

    Raises:
      EvidenceError: one of the files is missing or not what it must be.
    """
    assert settings.report is not None, "whoever calls this names a report"
    report = from_json(_read(settings.report), str(settings.report))
    verdict = judge(report, read_policy(settings.policy))
    return facts(verdict)


def facts(verdict: Verdict) -> dict[str, Any]:
    """The verdict, rule by rule, and the exit code that it stands for."""
    return {
        "verdict": verdict.sentence(),
        "status": verdict.status,
        "rules": [{"rule": o.subject, "status": o.status, "why": o.why} for o in verdict.outcomes],
        "exit_code": verdict.exit_code,
    }


def read_policy(path: Path | None) -> Policy:
    """The policy in a gate.toml, or the built-in one."""
    return Policy.from_toml(_decode(path), str(path)) if path else Policy.built_in()


def _decode(path: Path) -> str:
    try:
        return _read(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise EvidenceError(f"{path}: not UTF-8 text") from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise EvidenceError(f"{path}: no such file") from None
    except (IsADirectoryError, NotADirectoryError):
        raise EvidenceError(f"{path}: not a file") from None
    if len(content) > MAX_BYTES:
        raise EvidenceError(f"{path}: larger than {MAX_BYTES >> 20} MiB, so no report or policy")
    return content

"""What a run hands out: its reports, and `artifact/`, which exists only while the gate passes the exported files."""

import os
import shutil
from pathlib import Path

from compress.artifact import CARD, write_card
from eval.gate import Verdict
from eval.html import to_html
from eval.markdown import to_markdown, to_table
from eval.report import Report, to_json
from export.atomic import atomic_file, atomic_folder
from export.manifest import MANIFEST, read_manifest

# Of a released folder these two are its own; everything else is what the stage exported, under another name.
OWN = (CARD, MANIFEST)


def write_reports(folder: Path, report: Report, verdict: Verdict) -> None:
    """report.json, report.html and report.md beside each other."""
    texts = {"json": to_json(report), "html": to_html(report, verdict), "md": to_markdown(report, verdict)}
    for ending, text in texts.items():
        put(folder / f"report.{ending}", text)


def put(path: Path, text: str) -> None:
    """Write a file, unless it says so already."""
    if path.is_file() and path.read_bytes() == text.encode():
        return
    with atomic_file(path, force=True) as temporary:
        temporary.write_text(text, encoding="utf-8")


def release(exported: Path, artifact: Path, report: Report, verdict: Verdict) -> None:
    """Put the exported formats into `artifact`, with what was measured on their model cards."""
    metrics = {what: {"value": value, "interval": interval} for what, value, interval in to_table(report)}
    with atomic_folder(artifact, force=True) as folder:
        for source in sorted(path for path in exported.iterdir() if path.is_dir()):
            _link_files(source, folder / source.name)
            facts = read_manifest(source)["facts"]
            write_card(folder / source.name, facts, {"Gate": verdict.sentence()}, metrics)


def withdraw(artifact: Path) -> None:
    """Remove an artifact that the gate does not pass; a removal that is interrupted leaves none that looks whole."""
    if artifact.exists():
        aside = artifact.with_name(f".{artifact.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        artifact.rename(aside)
        shutil.rmtree(aside)


def _link_files(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif path.relative_to(source).as_posix() not in OWN:
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(path, place)


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

"""The import rule of docs/architecture.md: two leaf libraries, and floors inside `compress`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"compress", "eval", "export"}
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Top to bottom; a file or folder of compress/ that is missing here has no place yet.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"pipeline", "plan", "preflight", "release"},
    {"schema", "options", "gate", "artifact", "evaluate"},
    {"align"},
    {"distill"},
    {"quantize"},
    {"train", "generate"},
    {"models", "data", "device", "machine"},
    {"tokenizer", "chat_template", "sentencepiece_model", "settings", "locate", "display", "record"}
    | {"recipe", "keys", "progress", "log", "errors", "__init__"},
]
FOLDERS = {path.parts[1] for path in FILES if len(path.parts) > 2}


def imported(path):
    """Every module that the file imports, absolute, wherever in the file it does."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = list(path.parent.parts)[: len(path.parts) - node.level] if node.level else []
            module = start + (node.module.split(".") if node.module else [])
            # `from compress import x` is about x; of `from eval.report import x` the module is enough.
            yield from ([*module, alias.name] for alias in node.names) if len(module) == 1 else [module]


def floor(name):
    found = [height for height, names in enumerate(reversed(FLOORS)) if name in names]
    assert found, f"compress/{name} stands on no floor; give it one in {Path(__file__).name}"
    return found[0]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_imports_only_what_lies_below_it(path):
    package, own = path.parts[0], path.parts[1].removesuffix(".py")
    for module in imported(path):
        assert module != ["eval"], "`import eval` hides a builtin; write `from eval.report import Report`"
        if package != "compress":
            assert module[0] not in PACKAGES - {package}, f"{path} imports {module}"
        elif module[0] == "compress" and len(module) > 1 and module[1] != own:
            beside = floor(module[1]) == floor(own) and not {own, module[1]} & FOLDERS
            assert floor(module[1]) < floor(own) or beside, f"{path} imports {'.'.join(module)}, which is not below it"


def test_the_three_packages_have_files():
    assert {path.parts[0] for path in FILES} == PACKAGES

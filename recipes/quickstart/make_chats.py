"""Turn speeches into one-sentence exchanges: the user says a sentence, the assistant answers with the next and stops.

    python recipes/quickstart/make_chats.py

The teacher has never seen the tokens that a turn begins and ends with, so this is what the adapters have to teach.
"""

import json
import random
import re
from pathlib import Path

DATA = Path(__file__).parent / "data"
SHORTEST, LONGEST = 30, 160  # characters
SEED = 0


def sentences(text: str) -> list[str]:
    """The sentences of a speech, in order."""
    return [sentence.strip() for sentence in re.split(r"(?<=[.?!])\s+", text) if sentence.strip()]


def exchanges(path: Path) -> list[dict]:
    """Each pair of neighbouring sentences that are neither short nor long."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        spoken = sentences(json.loads(line)["text"])
        for first, second in zip(spoken[::2], spoken[1::2], strict=False):
            if all(SHORTEST <= len(sentence) <= LONGEST for sentence in (first, second)):
                turns = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
                found.append({"messages": turns})
    return found


def main() -> None:
    """Write a sample of the exchanges of either file."""
    for name, count in (("train", 1600), ("valid", 200)):
        rows = exchanges(DATA / f"{name}.jsonl")
        rows = random.Random(SEED).sample(rows, min(count, len(rows)))
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (DATA / f"chats-{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"chats-{name}.jsonl: {len(rows)} exchanges")


if __name__ == "__main__":
    main()

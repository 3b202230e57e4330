"""What the columns of a row must hold, by kind."""

from typing import Any

from compress.errors import DataError

MAX_MESSAGES = 10_000


def check_text(found: dict[str, Any]) -> dict[str, Any]:
    return {"text": _string("text", found["text"])}


def check_tokens(found: dict[str, Any]) -> dict[str, Any]:
    tokens = found["tokens"]
    good = isinstance(tokens, list) and all(type(t) is int and 0 <= t < 1 << 31 for t in tokens)
    if not good or not tokens:
        raise DataError(f"column 'tokens' must be a non-empty list of token ids, not {_type(tokens)}")
    return {"tokens": tokens}


def check_targets(found: dict[str, Any]) -> dict[str, Any]:
    tokens, mask = check_tokens(found)["tokens"], found["mask"]
    if not isinstance(mask, list) or len(mask) != len(tokens) or any(flag not in (0, 1) for flag in mask):
        raise DataError(f"column 'mask' must be a list of {len(tokens)} times 0 or 1, one a token, not {_type(mask)}")
    return {"tokens": tokens, "mask": mask}


def check_messages(found: dict[str, Any]) -> dict[str, Any]:
    return {"messages": _messages("messages", found["messages"])}


def check_completion(found: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = found["prompt"], found["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        prompt, completion = _messages("prompt", prompt), _messages("completion", completion)
        _answers("completion", completion)
        return {"prompt": prompt, "completion": completion}
    return {"prompt": _string("prompt", prompt), "completion": _string("completion", completion)}


def check_preference(found: dict[str, Any]) -> dict[str, Any]:
    """Strings, or lists of messages where the answers do not repeat the prompt."""
    if isinstance(found["chosen"], str) and isinstance(found["rejected"], str):
        values: dict[str, Any] = {column: _string(column, found[column]) for column in ("prompt", "chosen", "rejected")}
        _require_two_answers(values)
        return values
    chosen, rejected = (_messages(column, found[column]) for column in ("chosen", "rejected"))
    prompt = found.get("prompt")
    if prompt is None:
        prompt = _shared(chosen, rejected)
        if not prompt:
            raise DataError("columns 'chosen' and 'rejected' share no messages and there is no 'prompt'")
    elif isinstance(prompt, str):
        prompt = [{"role": "user", "content": _string("prompt", prompt)}]
    else:
        prompt = _messages("prompt", prompt)
    values = {"prompt": prompt}
    for column, answer in (("chosen", chosen), ("rejected", rejected)):
        values[column] = answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
        _answers(column, values[column])
    _require_two_answers(values)
    return values


CHECKS = {
    "preference": check_preference,
    "messages": check_messages,
    "completion": check_completion,
    "targets": check_targets,
    "tokens": check_tokens,
    "text": check_text,
}


def _shared(chosen: list, rejected: list) -> list:
    length = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        length += 1
    return chosen[:length]


def _answers(column: str, messages: list) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"column {column!r} has no message of role 'assistant'")


def _require_two_answers(values: dict[str, Any]) -> None:
    for column in ("chosen", "rejected"):
        if _is_blank(values[column]):
            raise DataError(f"column {column!r} is an empty answer")
    if values["chosen"] == values["rejected"]:
        raise DataError("columns 'chosen' and 'rejected' are equal, so neither is preferred")


def _is_blank(answer: str | list[dict[str, Any]]) -> bool:
    if isinstance(answer, str):
        return not answer.strip()
    turns = [message for message in answer if message["role"] == "assistant"]
    return not any(turn["content"].strip() or turn.get("tool_calls") for turn in turns)


def _string(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"column {column!r} must be a string, not {_type(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"column {column!r} holds a lone surrogate, which is not valid Unicode") from None
    return value


def _messages(column: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or len(value) > MAX_MESSAGES:
        raise DataError(f"column {column!r} must be a list of 1 to {MAX_MESSAGES} messages, not {_type(value)}")
    return [_message(f"{column}[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} must be an object with role and content, not {_type(message)}")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if _is_text(part)]
        if len(texts) < len(content):
            raise DataError(f"{where}.content has parts that are not text")
        content = "".join(texts)
    if content is None and message.get("tool_calls"):
        content = ""
    return {**message, "content": _string(f"{where}.content", content)}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)

"""Conversations: what a line of a chat file may contain, and where the answers in it begin and
end. Everything here is in examples/chat.py, too, letter for letter."""

import json
import re
from functools import partial

from jinja2 import TemplateError

REASONING = {"reasoning", "reasoning_content", "thinking"}
WEIGHTS = {"weight", "train", "loss_mask"}  # of a message: 0 or false if it is not to be learned
KNOWN = {"role", "content", "name", "id", "tool_calls", "tool_call_id", *REASONING}
UNSUPPORTED = {  # what others read, and what to write instead
    "system": "make it the first of the messages",
    "functions": "write them as tools",
    "function_call": "write it as tool_calls",
    **dict.fromkeys(WEIGHTS, "give one to each message"),
    **dict.fromkeys(("images", "videos", "audios"), "only text is supported"),
}
EMPTY = None, "", []  # what a message has in a column that only others need


def documents_of(line, tokenizer):
    """The documents of a conversation: the text of each, and where its answers begin and end.

    Most templates make one document. If a template changes earlier messages when others follow, as
    Qwen3's, which drops the reasoning of earlier answers, a new document begins there. So each
    answer is learned as the model will generate it, and once.
    """
    messages, learned, options = parse(line, str(tokenizer.chat_template))
    render = partial(tokenizer.apply_chat_template, tokenize=False, **options)
    whole = render(messages)
    if options["tools"] and is_same(render, messages, whole, tools=None):
        raise ValueError("the chat template does not use its tools")
    for i, message in enumerate(messages):
        other = [*messages[:i], message | {"content": "?"}, *messages[i + 1 :]]
        if message["content"].strip() not in whole and is_same(render, other, whole):
            raise ValueError(f"the chat template drops the content of message {i + 1}")

    documents = []
    for i in learned:
        prompt = render(messages[:i], add_generation_prompt=True)
        answered = render(messages[: i + 1])
        if not answered.startswith(prompt):  # DeepSeek-R1's ends with <think>, its answers do not
            prompt = render(messages[:i])
        if not answered.startswith(prompt) or answered == prompt:
            raise ValueError(f"the chat template does not add message {i + 1} to those before")
        for what, bare in without(messages[i]):
            if is_same(render, [*messages[:i], bare], answered):
                raise ValueError(f"the chat template drops the {what} of message {i + 1}")
        said = messages[i]["content"].strip()
        if said and answered.endswith(said) and not said.endswith(str(tokenizer.eos_token)):
            raise ValueError(f"the chat template adds no end to message {i + 1}, only its text")
        spans = []
        if documents and answered.startswith(documents[-1][0]):
            _, spans = documents.pop()
        documents.append((answered, [*spans, (len(prompt), len(answered))]))
    return documents or [(whole, [])]


def parse(line, template):
    """The messages of a line, the indices of the answers to learn, and the template's options."""
    found = json.loads(line)
    written = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(written, list) or not written:
        raise ValueError("it has no list of messages")
    for name, instead in UNSUPPORTED.items():
        if found.get(name) not in EMPTY:
            raise ValueError(f"its {name} would be ignored; {instead}")
    tools = found.get("tools")
    if isinstance(tools, str):  # as in a column of TRL, where other lines have an empty one
        tools = json.loads(tools or "[]")
    options = found.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise ValueError("its chat_template_kwargs are no object")
    words = {*re.findall(r"\w+", template)}
    if unused := sorted(options.keys() - words):
        raise ValueError(f"the chat template does not use {unused[0]} of chat_template_kwargs")
    messages = []
    learned = []
    for i, message in enumerate(written):
        try:
            messages.append(clean(message, words))
            if is_learned(message):
                learned.append(i)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"message {i + 1}: {error}") from error
    if learned[:1] == [0]:
        raise ValueError("message 1 is an answer to nothing; remove it, or give it a weight of 0")
    return messages, learned, {"tools": tools or None, **options}


def clean(message, words):
    """A message as templates take it: text in place of parts and of null, objects as arguments of
    tool calls, and nothing that has no value."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("its role is not text")
    kept = {}
    for name, value in message.items():
        if value in EMPTY or name in WEIGHTS:
            continue
        if name in UNSUPPORTED or name not in KNOWN | words:
            instead = UNSUPPORTED.get(name, "remove it")
            raise ValueError(f"the chat template does not use its {name}; {instead}")
        kept[name] = value
    content = message.get("content")
    if content is None and "tool_calls" in kept:
        content = ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if part.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError("its content is not text")
    kept["content"] = "".join(texts)
    if "tool_calls" in kept:
        kept["tool_calls"] = [with_object(call) for call in kept["tool_calls"]]
    return kept


def with_object(call):
    """A tool call with an object as arguments, for templates write JSON; OpenAI has text."""
    function = call.get("function", call)
    if isinstance(function.get("arguments"), str):
        function = function | {"arguments": json.loads(function["arguments"])}
    return call | {"function": function} if "function" in call else function


def is_learned(message):
    """Whether a message is an answer that has labels."""
    weights = [message[name] for name in WEIGHTS if message.get(name) is not None]
    for weight in weights:
        if weight not in (0, 1):
            raise ValueError(f"its weight is {weight!r}; use 0 or 1")
    is_answer = message["role"] == "assistant"
    if any(weights) and not is_answer:
        raise ValueError("only answers of an assistant are learned; use a weight of 0, or none")
    return is_answer and all(weights)


def without(answer):
    """What a template may drop from an answer, and the answer without it."""
    thought, _, said = answer["content"].rpartition("</think>")
    if thought.replace("<think>", "").strip():
        yield "reasoning", answer | {"content": said}
    for what, names in (("tool_calls", {"tool_calls"}), ("reasoning", REASONING)):
        if names & answer.keys():
            yield what, {name: value for name, value in answer.items() if name not in names}


def is_same(render, messages, text, **options):
    """Whether messages make this text, too."""
    try:
        return render(messages, **options) == text
    except (TemplateError, TypeError, ValueError):
        return False

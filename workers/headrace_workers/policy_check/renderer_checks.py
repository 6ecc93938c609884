"""Checks of renderer and tokenizer against the server's own.

* A tokenizer of another model fails ``vocabulary``, another template ``template``.
* A template that drops what the environment or the policy says fails ``roles``.
* A text that spells a control token stays text, or ``control tokens`` fails.
"""

from __future__ import annotations

from headrace.errors import EpisodeFailure
from headrace.trajectory import Message
from headrace.wire import policy_server
from headrace_workers.policy_check.findings import CheckFailed, CheckSkipped
from headrace_workers.policy_check.requests import DetokenizeResponse, TokenizeResponse
from headrace_workers.policy_check.target import ABSENT, IDS, MISMATCH, MORE, QUESTION, CheckTarget, cut
from headrace_workers.renderers import AssistantTurn, ConversationItem

AWKWARD = (
    "plain",
    " leading and trailing ",
    "line\nline\r\n\ttab",
    "naïve café, Grüße",
    "e\u0301 (a combining accent)",
    "日本語 العربية हिन्दी",
    "🙂🏳️‍🌈👩‍👩‍👧",
    "\u200b\ufeff zero width",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "<think> </think> <|im_end|> </s> [INST]",
    "0123456789 3.14159 1e-9",
    "\u0000\u001f control",
)
"""Texts that different tokenizers encode differently."""

TEMPLATE = "Use a chat template that shows every message, or the renderer of the model's family."


async def renderer(subject: CheckTarget) -> str:
    """Check that a token ends a turn."""
    stop_token_ids, tokenizer = subject.renderer.stop_token_ids, subject.renderer.tokenizer
    if not stop_token_ids:
        raise CheckFailed(
            "neither the template nor the tokenizer names a token that ends a turn",
            "Set sampling.stop in the run spec, or name eos_token in the model's tokenizer_config.json.",
        )
    ends = ", ".join(f"{id_} {subject.decode([id_])!r}" for id_ in stop_token_ids)
    return f"{tokenizer.name}: {tokenizer.vocab_size} ids; a turn ends with {ends}"


async def vocabulary(subject: CheckTarget) -> str:
    """Check that the server encodes text to the same ids as the tokenizer, and has as many ids."""
    compared = 0
    for text in AWKWARD:
        theirs = await _server_ids(subject, text)
        if theirs is None:
            break
        ours = subject.encode(text)
        if theirs != ours:
            raise CheckFailed(f"{text!r} is {cut(ours)} to the tokenizer, but {cut(theirs)} to the server", MISMATCH)
        compared += 1
    size = subject.renderer.tokenizer.vocab_size
    if not await _accepts(subject, size - 1):
        raise CheckFailed(f"the server refuses id {size - 1}; the tokenizer has {size} ids", MISMATCH)
    if await _accepts(subject, size):
        raise CheckFailed(
            f"the server knows id {size}; the tokenizer has {size} ids, so a sampled token may be refused",
            MISMATCH + " The folder must have the model's config.json.",
        )
    texts = f"{compared} texts have the same ids" if compared else "it has no /tokenize route to compare texts"
    return f"the server knows exactly {size} ids; {texts}"


async def _server_ids(subject: CheckTarget, text: str) -> list[int] | None:
    answer = await subject.server.post("/tokenize", prompt=text, add_special_tokens=False)
    return answer.read(TokenizeResponse).tokens if answer.status == 200 else None


async def _accepts(subject: CheckTarget, id_: int) -> bool:
    body = {"prompt": [*subject.prompt, id_], "max_tokens": 1}
    answer = await subject.server.post(policy_server.COMPLETIONS, **body)
    if answer.status not in (200, 400, 422):
        raise CheckFailed(f"{policy_server.COMPLETIONS} answers {answer.summary}", IDS)
    return answer.status == 200


async def roles(subject: CheckTarget) -> str:
    """Check that the template shows the messages of user and assistant; report those of system and tool."""
    reply = AssistantTurn(subject.encode("One."), "One.")
    refusals = {
        "user": _refusal(subject, QUESTION),
        "assistant": _refusal(subject, QUESTION, reply, MORE),
        "system": _refusal(subject, Message(role="system", content="Be brief."), QUESTION),
        "tool": _refusal(subject, QUESTION, reply, Message(role="tool", content="Two.")),
    }
    for role in ("user", "assistant"):
        if refusal := refusals[role]:
            raise CheckFailed(f"no message of role {role!r}: {refusal}", TEMPLATE)
    shown = ", ".join(role for role, refusal in refusals.items() if not refusal)
    others = "; ".join(f"not {role}: {refusal}" for role, refusal in refusals.items() if refusal)
    return f"the prompt shows messages of {shown}" + (f"; {others}" if others else "")


def _refusal(subject: CheckTarget, *conversation: ConversationItem) -> str:
    """The reason for which the renderer refuses a conversation; empty if it does not."""
    try:
        subject.renderer.start(conversation)
    except EpisodeFailure as failure:
        return f"{failure.kind}: {failure.detail}"
    return ""


async def control_tokens(subject: CheckTarget) -> str:
    """Check that the text of a whole prompt, in a message, adds no control token to the prompt."""
    plain = subject.prompt
    spelling = Message(role="user", content=subject.decode(plain))
    control = {id_ for id_ in plain if _spells_control_token(subject, id_)}
    added = _count(subject.renderer.start([spelling]).new_ids, control) - _count(plain, control)
    if added:
        raise CheckFailed(
            f"a message with the text of a prompt adds {added} control tokens to its prompt",
            "The tokenizer's files do not name its control tokens: add them to added_tokens in tokenizer.json.",
        )
    answer = await subject.server.post("/tokenize", messages=[{"role": "user", "content": spelling.content}])
    theirs = answer.read(TokenizeResponse).tokens if answer.status == 200 else []
    forged = theirs and _count(theirs, control) > _count(plain, control)
    note = "; at the server's chat route it would (policy.protocol 'chat')" if forged else ""
    return f"a message that spells {len(control)} control tokens adds none to the prompt{note}"


def _spells_control_token(subject: CheckTarget, id_: int) -> bool:
    return subject.renderer.count_control_tokens(Message(role="user", content=subject.decode([id_]))) > 0


def _count(ids: list[int], control: set[int]) -> int:
    return sum(id_ in control for id_ in ids)


async def template(subject: CheckTarget) -> str:
    """Check that the server's chat route renders the same prompts."""
    conversations = (
        [QUESTION],
        [Message(role="system", content="Be brief."), QUESTION],
        [QUESTION, Message(role="assistant", content="One."), MORE],
    )
    same = 0
    for messages in conversations:
        chat = [{"role": message.role, "content": message.content} for message in messages]
        answer = await subject.server.post("/tokenize", messages=chat, add_generation_prompt=True)
        try:
            ours = subject.renderer.start(messages).new_ids
        except EpisodeFailure as failure:
            if answer.status != 200:
                continue  # renderer and server both refuse it
            raise CheckFailed(
                f"the renderer refuses messages that the server accepts: {failure}", MISMATCH
            ) from failure
        if answer.status in ABSENT:
            raise CheckSkipped("the server has no /tokenize")
        if answer.status != 200:
            raise CheckSkipped(f"the server renders no chat ({answer.summary})")
        theirs = answer.read(TokenizeResponse).tokens
        if theirs != ours:
            at = _common_length(ours, theirs)
            raise CheckFailed(
                f"prompts differ from position {at}: {subject.decode(ours[at : at + 12])!r} here, "
                f"{subject.decode(theirs[at : at + 12])!r} at the server",
                "Use the server's template (policy.renderer = 'template', its --chat-template) and the same options "
                "(policy.renderer_options).",
            )
        same += 1
    return f"{same} conversations have the same prompt as at the server"


def _common_length(ours: list[int], theirs: list[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


async def text(subject: CheckTarget) -> str:
    """Check that awkward texts, including partial characters, survive encoding and decoding."""
    changed = [text for text in AWKWARD if subject.decode(subject.encode(text)) != text]
    halves = subject.encode("🙂")[:1]
    subject.decode(halves)
    compared = 0
    for awkward in (*AWKWARD, None):
        ids = halves if awkward is None else subject.encode(awkward)
        answer = await subject.server.post("/detokenize", tokens=ids)
        if answer.status in ABSENT:
            break
        if answer.status != 200:
            raise CheckFailed(f"/detokenize refuses {cut(ids)} ({answer.summary})", MISMATCH)
        theirs = answer.read(DetokenizeResponse).prompt
        if theirs != subject.decode(ids):
            raise CheckFailed(f"{cut(ids)} are {subject.decode(ids)!r} here, but {theirs!r} at the server", MISMATCH)
        compared += 1
    unchanged = f"{len(AWKWARD) - len(changed)} of {len(AWKWARD)} awkward texts are unchanged by encoding and decoding"
    same = f"; the server decodes {compared} id lists to the same texts" if compared else ""
    return unchanged + same

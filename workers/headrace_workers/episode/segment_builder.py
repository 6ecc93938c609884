"""The segment builder: collects the observations and turns of one agent, and builds its segments.

* Tokens are appended and never changed: a prompt is the segment so far plus new tokens.
* A turn is added when its step has returned; a turn whose step failed leaves no tokens behind.
* A reward between turns belongs to the last turn; before any turn, to the first.
* A history edit starts a new segment. So does a prompt that does not extend the segment: a template may render earlier
  turns differently than they were sampled, for example without their thinking.
* On truncation the agent's next observation is appended, unsampled, if all of it fits into the context and the renderer
  can append it. Otherwise it is omitted: no policy could have seen it, and a part of it would be an observation that
  never existed.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import msgspec
import numpy as np

from headrace.errors import EpisodeFailure, PolicyFailure
from headrace.trajectory import Message, Placeholder, Sampling, Segment, ToolCall, Turn, VersionRun
from headrace_workers.episode.environment_adapter import check_reward
from headrace_workers.episode.run_plan import AgentPlan
from headrace_workers.policies.base import Sample, SeenPrompt, append_versions
from headrace_workers.renderers import AssistantTurn, ConversationItem, CurrentSegment, Prompt, Renderer, Tools


class NextPrompt(NamedTuple):
    """The prompt of an agent's next turn: the segment's tokens (none in a new segment), and the new part.

    ``placeholders`` are those of the segment and, once the engine has processed the new images, theirs.
    ``image_token``: the single token of each image in a prompt that is sent.
    """

    segment_ids: list[int]
    prompt: Prompt
    placeholders: list[Placeholder]
    image_token: int | None

    @property
    def token_ids(self) -> list[int]:
        """The prompt to send."""
        if not self.placeholders:
            return self.segment_ids + self.prompt.new_ids
        sent: list[int] = []
        last = 0
        for item in self.placeholders:
            sent += self.segment_ids[last : item.start]
            sent.append(cast(int, self.image_token))
            last = item.end
        return sent + self.segment_ids[last:] + self.prompt.new_ids

    @property
    def images(self) -> list[str]:
        """The image assets of the prompt, in order."""
        return [*(item.asset for item in self.placeholders), *self.prompt.images]

    def checked(self) -> NextPrompt:
        """Check the image tokens and return the prompt. Raises PolicyFailure ``stray-image-token``."""
        images = self.images
        count = self.token_ids.count(cast(int, self.image_token)) if images else 0
        if count != len(images):
            raise PolicyFailure(
                f"A prompt with {len(images)} images has {count} image tokens: the policy sampled such a token, or a "
                "text contains it.",
                hint="Keep the token out of observations; with policy.structured_outputs the policy cannot sample it.",
                kind="stray-image-token",
                retryable=False,
            )
        return self

    def as_seen(self, seen: SeenPrompt) -> NextPrompt:
        """The prompt with all tokens of its images, as the engine saw it. Raises PolicyFailure ``images-changed``."""
        length, count = len(self.segment_ids), len(self.placeholders)
        ranges = [(item.start, item.end) for item in self.placeholders]
        if seen.token_ids[:length] != self.segment_ids or seen.images[:count] != ranges:
            raise PolicyFailure(
                "The engine used different tokens for images of an earlier prompt.",
                hint="All servers of a policy must process images in the same way.",
                kind="images-changed",
                retryable=False,
            )
        new = zip(seen.images[count:], self.prompt.images, strict=True)
        return self._replace(
            prompt=self.prompt._replace(new_ids=seen.token_ids[length:]),
            placeholders=[*self.placeholders, *(Placeholder(start, end, asset) for (start, end), asset in new)],
        )

    @property
    def length(self) -> int:
        return len(self.segment_ids) + len(self.prompt.new_ids)


class TurnRecord(msgspec.Struct, kw_only=True):
    """A turn of a running episode; late rewards are still added to it."""

    index: int
    start: int = 0
    end: int = 0
    reward: float
    reward_parts: dict[str, float]
    terminated: bool = False
    truncated: bool = False
    finish_reason: str
    continued: list[int] = []
    said: str
    tool_calls: list[ToolCall]
    policy_s: float
    environment_s: float

    def frozen(self) -> Turn:
        return Turn(**msgspec.structs.asdict(self))


class SegmentRecord(msgspec.Struct):
    """A segment of a running episode. ``tokens``, ``sampled`` and ``logprobs`` have one item for each position."""

    tokens: list[int] = []
    sampled: list[int] = []
    logprobs: list[float] = []
    turns: list[TurnRecord] = []
    versions: list[VersionRun] = []
    placeholders: list[Placeholder] = []
    is_text: bool = False
    """True if the ids of a turn were encoded from its text."""

    def append_unsampled(self, tokens: list[int]) -> None:
        """Append tokens of a prompt, or of the agent's next observation."""
        self.tokens += tokens
        self.sampled += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def append_turn(self, sample: Sample, turn: TurnRecord) -> None:
        """Append the tokens sampled in a turn, and set the turn's span."""
        turn.start = len(self.tokens)
        self.tokens += sample.token_ids
        turn.end = len(self.tokens)
        turn.continued = [turn.start + position for position in sample.continued]
        self.sampled += [1] * (turn.end - turn.start)
        self.logprobs += sample.logprobs
        append_versions(self.versions, sample.versions, turn.start)  # the prompt belongs to the first run
        self.turns.append(turn)


class AgentTrack:
    """The segments of one agent of one episode. ``sampling`` has the episode's seed; ``tools``: the functions that the
    policy may call."""

    def __init__(self, agent: str, plan: AgentPlan, sampling: Sampling, renderer: Renderer, tools: Tools = ()) -> None:
        self.agent = agent
        self.plan = plan
        self.sampling = sampling
        self.tools = tools
        self._renderer = renderer
        self._segments: list[SegmentRecord] = []
        self._conversation: list[ConversationItem] = []
        self._pending: list[Message] = []
        self._edited = False
        self._last_prompt = Prompt([])
        self.early_reward = 0.0
        """Rewards from before the agent's first turn, which will be added to it."""
        self._early_parts: dict[str, float] = {}

    @property
    def last_turn(self) -> TurnRecord | None:
        """The agent's last turn, if it had one."""
        return self._segments[-1].turns[-1] if self._segments else None

    def observe(self, message: Message) -> None:
        """Add an observation before the agent's next turn."""
        self._pending.append(message)

    def replace_history(self, messages: list[Message]) -> None:
        """Replace the whole history: the next turn starts a new segment."""
        self._conversation = []
        self._pending = list(messages)
        self._edited = True

    def prompt(self) -> NextPrompt:
        """The prompt of the next turn. Raises InfrastructureFailure of the renderer, PolicyFailure."""
        if self._segments and not self._edited:
            extension = self._extension()
            if extension is not None:
                segment = self._segments[-1]
                image_token = self._renderer.image_token_id
                return NextPrompt(segment.tokens, extension, segment.placeholders, image_token).checked()
        start = self._renderer.start([*self._conversation, *self._pending], self.tools)
        return NextPrompt([], start, [], self._renderer.image_token_id).checked()

    def messages(self) -> list[Message]:
        """The messages of the next turn, for a server that renders them itself."""
        conversation = [
            Message(role="assistant", content=item.text, agent=self.agent) if isinstance(item, AssistantTurn) else item
            for item in self._conversation
        ]
        return conversation + self._pending

    def rendered_as(self, next_prompt: NextPrompt, rendered: list[int]) -> NextPrompt:
        """The prompt of a turn that the server rendered: its ids extend the segment, or start a new one."""
        segment_ids = self._segments[-1].tokens if self._segments and not self._edited else []
        if len(rendered) <= len(segment_ids) or rendered[: len(segment_ids)] != segment_ids:
            segment_ids = []
        return NextPrompt(segment_ids, Prompt(rendered[len(segment_ids) :], next_prompt.prompt.text), [], None)

    def _extension(self) -> Prompt | None:
        segment = self._segments[-1]
        turn_start, note = segment.turns[-1].start, self._last_prompt.text
        current = CurrentSegment(segment.tokens, turn_start, self._conversation, note, self.tools)
        return self._renderer.extend(current, self._pending)

    def commit(self, next_prompt: NextPrompt, sample: Sample, text: str, turn: TurnRecord) -> None:
        """Append a turn's prompt and its sample with the full ``text``; set the turn's span."""
        if not next_prompt.segment_ids:
            self._segments.append(SegmentRecord())
            self._edited = False
        segment = self._segments[-1]
        segment.append_unsampled(next_prompt.prompt.new_ids)
        segment.placeholders = next_prompt.placeholders
        segment.append_turn(sample, turn)
        segment.is_text = segment.is_text or sample.text is not None
        self._last_prompt = next_prompt.prompt
        self._conversation += self._pending
        self._conversation.append(AssistantTurn(sample.token_ids, text))
        self._pending.clear()
        if self.early_reward or self._early_parts:
            turn.reward = _sum(turn.reward, self.early_reward)
            _add_parts(turn.reward_parts, self._early_parts)
            self.early_reward, self._early_parts = 0.0, {}

    def add_reward(self, reward: float, parts: dict[str, float]) -> None:
        """Add a reward that did not come with the agent's own step."""
        last = self.last_turn
        if last is None:
            self.early_reward = _sum(self.early_reward, reward)
            _add_parts(self._early_parts, parts)
        else:
            last.reward = _sum(last.reward, reward)
            _add_parts(last.reward_parts, parts)

    def end_turns(self, *, terminated: bool, truncated: bool) -> None:
        """Mark the last turn as the agent's end. Terminated wins over truncated."""
        last = self.last_turn
        if last is not None:
            last.terminated = last.terminated or terminated
            last.truncated = (last.truncated or truncated) and not last.terminated

    def append_unseen(self, max_context_tokens: int) -> None:
        """Append the agent's next observation, unsampled, if it fits; not after a history edit, which ended the
        segment."""
        last = self.last_turn
        if last is None or last.terminated or self._edited or not self._pending:
            return
        segment = self._segments[-1]
        try:
            unseen = self._extension()
        except EpisodeFailure:
            return  # such as an image without text, which a policy could not have seen either
        if unseen is None or len(segment.tokens) + len(unseen.new_ids) > max_context_tokens:
            return
        if unseen.images:
            return  # only an engine that saw an image knows its number of tokens
        segment.append_unsampled(unseen.new_ids)
        run = segment.versions.pop()
        segment.versions.append(VersionRun(len(segment.tokens), run.lineage, run.n))
        self._pending.clear()

    def segments(self) -> list[Segment]:
        """The agent's segments, in order."""
        return [self._segment(record) for record in self._segments]

    def _segment(self, record: SegmentRecord) -> Segment:
        return Segment(
            agent=self.agent,
            policy=self.plan.policy,
            sampling=msgspec.structs.replace(self.sampling, logprobs="none") if record.is_text else self.sampling,
            train=self.plan.train,
            token_ids=np.array(record.tokens, np.int32),
            sampled=np.array(record.sampled, np.uint8),
            logprobs=np.array(record.logprobs, np.float32),
            versions=record.versions,
            turns=[turn.frozen() for turn in record.turns],
            placeholders=record.placeholders,
        )


def _add_parts(parts: dict[str, float], more: dict[str, float]) -> None:
    for name, value in more.items():
        parts[name] = _sum(parts.get(name, 0.0), value)


def _sum(reward: float, more: float) -> float:
    """The sum of two rewards of one turn. Raises EnvironmentFailure beyond the bound of a reward."""
    return check_reward(reward + more, "The sum of the rewards of a turn")

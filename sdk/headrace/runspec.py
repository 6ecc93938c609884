"""``RunSpec``: the complete description of a run, one learner's stream of experience.

* Every field states its unit and the reason for its default; unknown fields are refused.
* A spec that can never be served is refused at its creation, not when a pull waits forever.
* A spec that cannot be stored is refused at its creation: numbers fit in 63 bits, data for environments is plain JSON.
* The spec of a run never changes; the log has it as it was submitted.
* A spec that an earlier version accepted is read, even if a bound is newer.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from headrace.bounds import (
    MAX_COUNT,
    MAX_EXACT,
    MAX_LABEL,
    MAX_NESTING,
    MAX_REFERENCE,
    MAX_SECONDS,
    MAX_TEMPERATURE,
    MIN_LEASE_S,
    MIN_SECONDS,
    MIN_TEMPERATURE,
    require_plain,
)
from headrace.common.registry import Registry
from headrace.errors import MAX_PROBLEM_CHARS, InvalidRequest, InvalidRunSpec
from headrace.estimators import ESTIMATORS, NONE
from headrace.selection import SELECTION_RULES
from headrace.spec_bounds import STORED, Between, Entries, Text
from headrace.wire.policy_server import DNS_PREFIX, canonical_address

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
"""A name that is safe in paths, URLs and metric labels."""

EnvironmentId = Annotated[str, Field(min_length=1, max_length=200), Text()]
"""An environment's id. With wrappers it is longer than a name: ``python:math:Arithmetic-v0``."""

MAX_TAGS = 16
"""Most tags of a task. Tags classify tasks; the id identifies a task."""

MAX_INTEGER = (1 << 63) - 1
"""Largest integer in a spec, which the log and readers in any language can hold."""

Label = Annotated[str, Text()]
"""A name that need not be safe in paths."""

Reference = Annotated[str, Text(MAX_REFERENCE)]
"""A path, an address, or the name of a model."""

Temperature = Annotated[float, Field(ge=0), Between(MIN_TEMPERATURE, MAX_TEMPERATURE, or_zero=True)]

Seconds = Annotated[float, Field(gt=0), Between(MIN_SECONDS, MAX_SECONDS)]

LeaseTerm = Annotated[float, Field(gt=0), Between(MIN_LEASE_S, MAX_SECONDS)]
"""Term of a lease, in seconds."""

Size = Annotated[int, Field(ge=1, le=MAX_INTEGER), Between(1, MAX_EXACT)]
"""Bytes or tokens."""

Weight = Annotated[float, Field(gt=0), Between(1e-9, 1e9)]

MAX_PROBLEMS = 20
"""Most invalid fields that an error names."""

MAX_MIXTURE = 10_000
"""Most entries of a mixture."""

MAX_EXPONENT = 4.0
"""Largest exponent of priorities: with priorities of 1e-6 to 1e6, weights are numbers that can be summed exactly."""


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    require_plain(value, MAX_NESTING)
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise ValueError(f"it cannot be stored with integers of 64 bits: {error}") from error
    return value


Json = Annotated[dict[str, Any], AfterValidator(_storable)]
"""Data for an environment: plain JSON, integers within 64 bits, at most ``MAX_NESTING`` levels deep."""

Tags = Annotated[list[Name], Field(max_length=MAX_TAGS)]
"""Labels that classify tasks."""

CONSTRAINTS = frozenset({"json", "regex", "choice", "grammar"})
"""Kinds of constraints on structured outputs."""

RUN_PROGRAMS = frozenset({"code", "python"})
"""Families of environments that run the policy's programs in a sandbox, also when another environment wraps them."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class EnvironmentSpec(_Model):
    """An entry of the mixture from which tasks are drawn."""

    id: EnvironmentId
    """Environment id, such as ``game:GuessTheNumber-v0-hard``, of 1 to 200 characters."""
    kwargs: Json = {}
    """Passed to the environment's constructor."""
    weight: Weight = 1.0
    """Relative share of groups, 1e-9 to 1e9. Default 1: equal shares."""
    tags: Tags = []
    """Words that a pull may ask for, such as ``["hard"]``. Default: none."""


class TaskSpec(_Model):
    """A task of a fixed list."""

    environment: EnvironmentId
    """Environment id, of 1 to 200 characters."""
    seed: int = Field(default=0, ge=0, le=MAX_INTEGER)
    """Seed of the environment, which determines it completely. Default 0."""
    kwargs: Json = {}
    """Passed to the environment's constructor."""
    example: Json | None = None
    """A dataset row, passed to the constructor as ``example=``. Default: none."""
    id: Annotated[str, Text(least=0)] = ""
    """The submitter's name for the task. Default: its position in the list."""
    tags: Tags = []
    """Words that a pull may ask for, such as ``["hard"]``. Default: none."""


def _require_registered(registry: Registry[Any], name: str) -> str:
    try:
        registry.find(name)
    except InvalidRequest as error:
        raise ValueError(str(error)) from error
    return name


def _estimator_names(schema: dict[str, Any]) -> None:
    schema["enum"] = [NONE, *ESTIMATORS.names()]


class EstimatorSpec(_Model):
    """The estimator of advantages. Definitions: ``docs/estimators.md``."""

    name: str = Field(default="rebn", json_schema_extra=_estimator_names)
    """The estimator. Default ReBN, which needs no groups and supports per-turn rewards and γ < 1."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per *turn*, never per token. Default 1: no discount."""
    ddof: Literal[0, 1] = 0
    """Delta degrees of freedom of σ. Default 0: population, as in GEM. 0 is required with token weighting."""
    eps: float = Field(default=1e-9, ge=0, lt=1)
    """Added to σ. Default 1e-9, as in GEM."""
    weighting: Literal["turn", "token"] = "turn"
    """Weight of a turn in μ and σ: 1, or its sampled tokens. Default: 1."""

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, value: str, info: ValidationInfo) -> str:
        return value if value == NONE or info.context is STORED else _require_registered(ESTIMATORS, value)

    @model_validator(mode="after")
    def _ddof_fits(self, info: ValidationInfo) -> Self:
        if info.context is STORED:
            return self
        token = self.weighting == "token" or (self.name != NONE and ESTIMATORS.find(self.name).by_tokens)
        if token and self.ddof != 0:
            raise ValueError("ddof must be 0 with token weighting: token counts are weights, not samples")
        return self


class AdapterSpec(_Model):
    """A frozen LoRA adapter: an opponent, a reference, a judge."""

    name: Name
    """Name in this run and at the policy servers, such as ``opponent-3``."""
    path: Reference = Field(min_length=1)
    """Folder as PEFT writes it: a path that the policy servers can read."""
    pinned: bool = False
    """True: servers always hold it. Default false: the least recently used adapter is replaced when another is
    needed."""


def _plain_addresses(value: list[str]) -> list[str]:
    for endpoint in value:
        if canonical_address(endpoint).startswith(DNS_PREFIX):
            raise ValueError(f"{endpoint!r} is a DNS name of several servers, which only policy.endpoints accepts")
    return value


Addresses = Annotated[list[Reference], Field(min_length=1), Entries(), AfterValidator(_plain_addresses)]
"""Base addresses of policy servers that the orchestrator does not manage."""


class AgentSpec(_Model):
    """The policy of an agent in a multi-agent environment."""

    base: Reference | None = None
    """Name of the policy's weights, which is the model name in requests. Default: the run's."""
    endpoints: Addresses | None = None
    """Addresses of its policy servers. Default: the run's."""
    adapters: Annotated[list[Name], Entries()] = []
    """Names of ``policy.adapters`` that play the agent, on the run's servers. Default: none, the policy itself
    plays."""
    routing: Literal["fixed", "round_robin"] = "fixed"
    """The adapter for a group: always the first, or the next one for each group. All episodes of a group have the same
    adapter. Default fixed."""
    train: bool = True
    """True: its segments are rows. Default true; a frozen opponent has ``train = false``."""
    temperature: Temperature | None = None
    """Sampling temperature, as in ``sampling``. Default: the run's."""


class AdmissionSpec(_Model):
    """Adaptive bound on the training episodes at workers, by the metrics of the policy servers. ``docs/policy.md`` has
    the rules."""

    adapt: bool = True
    """True: the bound adapts. Default true, if ``policy.endpoints`` have vLLM's metrics. ``max_concurrent`` applies in
    any case."""
    start: int = Field(default=32, ge=1, le=MAX_COUNT)
    """Episodes for each server before its metrics are known. Default 32, which every engine can serve."""
    floor: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Lower bound, whatever the metrics. Default 1."""
    ceiling: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Upper bound, whatever the metrics. Default none."""

    @model_validator(mode="after")
    def _floor_fits(self) -> Self:
        if self.ceiling is not None and self.ceiling < self.floor:
            raise ValueError(f"ceiling = {self.ceiling} is below floor = {self.floor}")
        return self


class SyncSpec(_Model):
    """Loading of new weights into the policy servers, when a version is announced with weights."""

    order: Literal["together", "rolling"] = "together"
    """All servers at once, or one after the other while the others serve. Default together, which mixes versions
    least."""
    pause: Literal["keep", "wait", "abort"] = "keep"
    """Treatment of running requests: ``keep``, they continue from their tokens on the new weights; ``wait``, they
    finish on the old weights first; ``abort``, they end and are continued from their tokens by a new request. Default
    keep."""
    pause_lease_s: LeaseTerm = 120.0
    """Longest pause of a server in seconds, including the load. Default 120. After that it resumes with the weights
    that it holds; if these are unknown, its requests are ended and sent to other servers."""


class ScorerSpec(_Model):
    """A policy that scores the tokens of a batch, such as a reference or a teacher."""

    endpoints: Addresses
    """Base addresses of its policy servers. They must support ``prompt_logprobs`` on ``/v1/completions``, as vLLM does,
    and a context of one token more than the longest row."""
    model: Reference
    """The model name in requests."""


class PolicySpec(_Model):
    """The policy of the run, and its policy servers."""

    endpoints: Annotated[list[Reference], Entries()] = []
    """Base addresses of the servers, such as ``http://127.0.0.1:8471``; or DNS names such as ``dns+http://vllm:8000``,
    which mean the servers at all addresses to which the name resolves. Default: the address of each worker's start."""
    model: Reference = "policy"
    """The model name in requests."""
    base: Reference = "policy"
    """Name of the weights in trajectories."""
    protocol: Literal["auto", "generate", "completions", "chat"] = "auto"
    """Route of sampling requests: vLLM's ``/inference/v1/generate`` (which states the version of each token),
    ``/v1/completions``, or ``/v1/chat/completions``. Default: the first of these that a server has."""
    logprobs: Literal["raw", "processed"] = "raw"
    """Kind of the servers' logprobs: before (``raw``) or after (``processed``) temperature and filters, as in vLLM's
    ``--logprobs-mode``. It is recorded with every row. Default raw, which is vLLM's default."""
    interrupted: Literal["continue", "restart"] = "continue"
    """Treatment of a turn that the engine ended for new weights: it continues from its tokens on the new weights, or is
    sampled again. Default continue, which loses nothing."""
    renderer: Label = "bytes"
    """Rendering of messages as tokens: ``bytes``; ``template``, the chat template of the model; a model family, such as
    ``qwen3``; or ``auto``, the model's family if it is known, else its template. Default ``bytes``."""
    tokenizer: Annotated[str, Text(MAX_REFERENCE, least=0)] = ""
    """The model's folder on the workers, or its name on the hub. Every renderer except ``bytes`` needs it."""
    renderer_options: Json = {}
    """Variables of the chat template, or fields of the family's configuration, such as ``{"enable_thinking": false}``.
    Default: none."""
    admission: AdmissionSpec = AdmissionSpec()
    """Bound on the episodes that its servers get at a time."""
    sync: SyncSpec = SyncSpec()
    """Loading of new weights into its servers."""
    adapter: Name | None = None
    """Name of the trained LoRA adapter: versions are announced with weights of kind ``adapter``. Default none: the base
    itself is trained."""
    adapters: Annotated[list[AdapterSpec], Entries()] = []
    """Frozen adapters that play agents. Default: none."""
    max_adapters: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Adapters that each server holds at a time; pinned ones and those in use may exceed it. Default: the number that a
    server can run at a time by its metrics (vLLM's ``--max-loras``)."""
    agents: Annotated[dict[Label, AgentSpec], Entries()] = {}
    """Overrides by agent name, for environments with several agents. Default: this policy plays all, and trains."""
    scorers: Annotated[dict[Name, ScorerSpec], Entries()] = {}
    """Policies that score every token of each row; a row has their logprobs as the array ``logprobs.NAME``. Default:
    none."""

    @model_validator(mode="after")
    def _renderer_has_what_it_needs(self) -> Self:
        if self.renderer != "bytes" and not self.tokenizer:
            raise ValueError(f"renderer = {self.renderer!r} needs a tokenizer: the model's folder or name")
        if self.renderer == "bytes" and (self.tokenizer or self.renderer_options):
            raise ValueError("renderer = 'bytes' has no tokenizer and no options; set renderer to 'auto' or 'template'")
        return self

    @model_validator(mode="after")
    def _adapters_are_known(self) -> Self:
        names = [adapter.name for adapter in self.adapters]
        if len({*names, self.adapter}) < len(names) + 1:
            raise ValueError("two adapters have the same name")
        if (names or self.adapter) and not self.endpoints:
            raise ValueError("adapters are loaded into the run's policy servers: list these in policy.endpoints")
        for name, agent in self.agents.items():
            unknown = [adapter for adapter in agent.adapters if adapter not in names]
            if unknown:
                raise ValueError(f"agent {name!r} names the adapter {unknown[0]!r}, which is not in policy.adapters")
            if agent.adapters and (agent.train or agent.endpoints is not None or agent.base is not None):
                raise ValueError(
                    f"agent {name!r} has frozen adapters: it needs train = false, and no base or endpoints"
                )
        return self

    @field_validator("endpoints")
    @classmethod
    def _endpoints_are_addresses(cls, value: list[str]) -> list[str]:
        for endpoint in value:
            canonical_address(endpoint)
        return value


class SamplingSpec(_Model):
    """The sampling parameters."""

    temperature: Temperature = 1.0
    """Temperature: 0, which is greedy, or 0.01 to 100. Default 1: logprobs are those of the policy itself."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass. Default 1: no cut."""
    max_tokens: int = Field(default=512, ge=1, le=MAX_COUNT)
    """Most tokens sampled in a turn. Default 512."""
    stop: Annotated[list[Annotated[str, Text(MAX_REFERENCE, lines=True)]], Entries()] = []
    """Stop strings. Default: only the renderer's end-of-turn token."""
    structured_outputs: Json | None = None
    """Format of every output, in vLLM's form: ``{"json": SCHEMA}``, or with ``regex``, ``choice`` or ``grammar``.
    Default: no constraint."""

    @field_validator("structured_outputs")
    @classmethod
    def _one_constraint(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and (len(value) != 1 or not value.keys() <= CONSTRAINTS):
            raise ValueError(f"give exactly one of {', '.join(sorted(CONSTRAINTS))}")
        return value


class LimitSpec(_Model):
    """Budgets, whose end truncates an episode, and deadlines, whose end fails it."""

    max_turns: int = Field(default=64, ge=1, le=MAX_COUNT)
    """Most turns of an episode, over all agents. Default 64."""
    max_context_tokens: int = Field(default=32768, ge=1, le=MAX_COUNT)
    """Most tokens of a segment, prompt included. Default 32768."""
    working_time_s: Seconds = 600.0
    """Working time of an episode in seconds, without waits. Default 600."""
    environment_timeout_s: Seconds = 60.0
    """Deadline of one reset or step in seconds. Default 60. Exceeding it is an environment failure."""
    policy_timeout_s: Seconds = 300.0
    """Deadline of one policy request in seconds. Default 300. Exceeding it is a policy failure."""
    episode_timeout_s: Seconds = 3600.0
    """Wall-clock deadline of an attempt in seconds. Default 3600. Exceeding it is an infrastructure failure."""


class RetrySpec(_Model):
    """Retries of failed attempts, and the quarantine of tasks.

    The loss of a worker (a crash, a spot instance) is not the task's fault: its attempts are queued again, without
    using the budget or counting for the quarantine. An episode that lost ten times ``max_attempts`` workers fails
    permanently at the next loss, as infrastructure/``lease-expired``, so that a task that crashes its worker ends.
    Each worker counts once.
    """

    max_attempts: int = Field(default=3, ge=1, le=100)
    """Attempts of an episode, including the first, that may fail retryably or be dropped by a live worker. Default
    3."""
    quarantine_after: int = Field(default=3, ge=1, le=MAX_COUNT)
    """Failed attempts of a task, over all its episodes, before it is quarantined. An attempt that failed because a
    policy server was unreachable does not count; one with an invalid response does. Default 3."""


def _selection_rule_names(schema: dict[str, Any]) -> None:
    schema["enum"] = SELECTION_RULES.names()


class SelectionSpec(_Model):
    """Selection of eligible groups for a batch. ``docs/selection.md`` has the complete rules."""

    order: str = Field(default="fifo", json_schema_extra=_selection_rule_names)
    """``fifo``: first dispatched first, and a batch waits for an older group rather than let it go stale. ``ready``:
    first dispatched first among the complete groups, without waiting. ``lifo``: last dispatched first. ``uniform``,
    ``prioritized``: drawn without replacement. Default fifo: every kind of task is trained on as often as it is drawn;
    all other orders favor short episodes."""
    exponent: float = Field(default=1.0, ge=0, le=MAX_EXPONENT)
    """Exponent of priorities in a prioritized draw: the weight of a group is its priority to this power. Default 1; 0
    is uniform."""

    @field_validator("order")
    @classmethod
    def _order_is_known(cls, value: str, info: ValidationInfo) -> str:
        return value if info.context is STORED else _require_registered(SELECTION_RULES, value)


class RunSpec(_Model):
    """A run. Give ``environments`` (a mixture), ``tasks`` (a fixed list), or neither (the learner submits groups)."""

    name: Name
    """Name of the run; unique in a data directory."""
    environments: Annotated[list[EnvironmentSpec], Field(fail_fast=True), Entries(MAX_MIXTURE)] = []
    """The mixture from which tasks are drawn without end. Default: none."""
    tasks: Annotated[list[TaskSpec], Field(fail_fast=True)] | None = None
    """A fixed list of tasks, in this order. Default: none."""
    epochs: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Passes over the fixed list. Default 1."""
    seed: int = Field(default=0, ge=0, le=MAX_INTEGER)
    """Seed of all random draws of the run. Default 0."""
    group_size: int = Field(default=1, ge=1, le=4096)
    """Episodes of a group. Default 1, which estimators without groups need."""
    batch_size: int = Field(default=32, ge=1, le=MAX_COUNT)
    """Episodes of a batch; a batch is ⌈batch_size / group_size⌉ whole groups. Default 32."""
    batch_tokens: Size | None = None
    """Size of a batch in tokens of its rows; if given, it replaces ``batch_size``. Default: none."""
    bin_tokens: Size | None = None
    """Most tokens of a bin. The rows of a batch are packed into bins, first-fit decreasing; the batch has the bin of
    each row. A group with a longer row is retired. Default none: each row is its own bin."""
    max_staleness: int = Field(default=1, ge=0, le=MAX_COUNT)
    """Most versions that a group's oldest row may be behind when its batch is formed. Default 1: one step of
    overlap."""
    max_uses: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Number of times that a group is served and acked. Default 1."""
    max_concurrent: int = Field(default=4096, ge=1, le=MAX_COUNT)
    """Most episodes dispatched at a time. Default 4096; usually staleness bounds admission earlier."""
    max_bytes: Size = 4 << 30
    """Bytes that groups in flight may hold, reservations included. Default 4 GiB."""
    selection: SelectionSpec = SelectionSpec()
    """Selection of eligible groups for a batch."""
    partial_batches: bool = True
    """True: the last batch of a fixed list may be smaller, with its true size in the manifest. Default true."""
    short_groups: Literal["top_up", "serve", "drop"] = "top_up"
    """Treatment of a group with a permanently failed member: ``top_up``, a new member is added while staleness allows;
    ``serve``, it is served with its true size; ``drop``, it is dropped and another is admitted. Default top_up."""
    partial_after_s: Seconds | None = None
    """Seconds that a group waits for its other members after the first one ended. Then these are cancelled, and the
    group is served with its true size. Default none: it waits for all."""
    zero_variance: Literal["keep", "drop", "replace"] = "keep"
    """Treatment of groups whose returns are all equal: ``keep``, they are served; ``drop``, the batch is smaller
    without them; ``replace``, other groups take their place in the batch. Default keep."""
    first_prompts: Literal["same", "any"] = "same"
    """First prompts of a group's members: ``same``, a group in which they differ is not compared, because its members
    had different tasks; ``any``, it is compared, as for an environment whose first words vary by design. Default
    same."""
    max_replaced: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Most zero-variance groups that are replaced for one batch; further ones are served. Default none: three times the
    groups of a batch."""
    estimator: EstimatorSpec = EstimatorSpec()
    """The estimator of advantages."""
    policy: PolicySpec = PolicySpec()
    """The policy and its servers."""
    sampling: SamplingSpec = SamplingSpec()
    """The sampling parameters."""
    limits: LimitSpec = LimitSpec()
    """Budgets and deadlines."""
    retries: RetrySpec = RetrySpec()
    """Attempts and quarantine."""
    pool: Name = "default"
    """Pool of the workers that run its episodes. Default ``default``."""
    capabilities: Annotated[list[Label], Entries()] = []
    """Capabilities that a worker must have, such as ``["reasoning-gym"]``. Default: none; environments of the families
    ``code`` and ``python`` always need ``sandbox``."""
    attempt_lease_s: LeaseTerm = 30.0
    """Term of an attempt lease in seconds, 0.1 or more; a worker's heartbeat renews it. Default 30."""
    batch_lease_s: LeaseTerm = 300.0
    """Term of a batch lease in seconds, 0.1 or more; the learner's activity reports renew it. Default 300."""
    evaluation_slots: float = Field(default=0.25, ge=0, le=1)
    """Share of slots that evaluation episodes may take if training needs them too. Default 0.25."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.environments and self.tasks is not None:
            raise ValueError("give environments (a mixture) or tasks (a fixed list), not both")
        if self.partial_after_s is not None and self.short_groups == "drop":
            raise ValueError("partial_after_s serves incomplete groups, which short_groups = 'drop' excludes")
        if self.max_replaced is not None and self.zero_variance != "replace":
            raise ValueError("max_replaced needs zero_variance = 'replace'")
        if self.tasks is None and self.epochs != 1:
            raise ValueError("epochs needs a fixed list of tasks; a mixture has no end")
        return self

    @property
    def source(self) -> Literal["mixture", "list", "learner"]:
        """The source of the run's tasks."""
        if self.tasks is not None:
            return "list"
        return "mixture" if self.environments else "learner"

    @property
    def needed_capabilities(self) -> frozenset[str]:
        """Capabilities that a worker must have: those in the spec, and those that its environments need.

        The needs of tasks that the learner submits later are unknown.
        """
        ids = [entry.id for entry in self.environments] + [task.environment for task in self.tasks or []]
        needs = {"sandbox"} if any(RUN_PROGRAMS.intersection(name.split(":")[:-1]) for name in ids) else set()
        return frozenset({*self.capabilities, *needs})

    @property
    def batch_groups(self) -> int:
        """Groups of a batch: ⌈batch_size / group_size⌉, or the minimum of 1 with ``batch_tokens``."""
        return 1 if self.batch_tokens is not None else math.ceil(self.batch_size / self.group_size)


def field_problems(error: ValidationError) -> list[dict[str, str]]:
    """The first ``MAX_PROBLEMS`` invalid fields, with the allowed values."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return [
        {
            "field": ".".join(str(part)[:MAX_LABEL] for part in item["loc"]) or "(spec)",
            "problem": item["msg"].removeprefix("Value error, ")[:MAX_PROBLEM_CHARS],
        }
        for item in found[:MAX_PROBLEMS]
    ]


def parse_run_spec(value: Any) -> RunSpec:
    """Parse a new RunSpec from plain JSON data. Raises InvalidRunSpec, which names every invalid field and the allowed
    values."""
    return _parse(value, None)


def read_run_spec(value: Any) -> RunSpec:
    """Read a RunSpec that a service accepted, possibly an earlier version with wider bounds. Raises InvalidRunSpec."""
    return _parse(value, STORED)


def _parse(value: Any, context: dict[str, bool] | None) -> RunSpec:
    try:
        return RunSpec.model_validate(value, context=context)
    except ValidationError as error:
        problems = field_problems(error)
        text = "; ".join(f"{item['field']}: {item['problem']}" for item in problems)
        text += f"; and {error.error_count() - len(problems)} more" if error.error_count() > len(problems) else ""
        raise InvalidRunSpec(
            f"The run spec is not valid: {text.removesuffix('.')}.",
            hint="`headrace run --schema` prints every field with its unit and default.",
            problems=problems,
        ) from error

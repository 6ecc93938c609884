"""``RunSpec``: everything a run is. One learner's stream of experience.

* Every field states its unit and its default's reason; unknown fields are refused.
* A spec that could never be served is refused when it is made, not when a pull hangs.
* A spec that could not be stored is refused when it is made: numbers fit 63 bits, data for environments is plain JSON.
* The spec of a run never changes; it is in the log as it was given.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headrace.errors import InvalidRequest, InvalidRunSpec
from headrace.estimators import NONE, estimator_names, find_estimator
from headrace.selection import find_selection_rule, selection_rule_names
from headrace.wire.policy_server import DNS_PREFIX, canonical_address

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
"""Names that are safe in paths, URLs and metric labels."""

EnvironmentId = Annotated[str, Field(min_length=1, max_length=200)]
"""An environment's id. Wrappers make it longer than a name: ``python:math:Arithmetic-v0``."""

MAX_TAGS = 16
"""Most tags of a task. Tags are for sorting tasks into kinds; what tells every task apart is its id."""

MAX_INTEGER = (1 << 63) - 1
"""Largest number of a spec: what the log, and a reader in any language, can hold."""

MAX_COUNT = (1 << 31) - 1
"""Largest count of a spec: products of two are still numbers of 63 bits."""

MAX_EXPONENT = 4.0
"""Largest exponent of priorities: with priorities of 1e-6 to 1e6 weights are numbers that add up exactly."""

MAX_NESTING = 64
"""Deepest nesting of data for an environment: far more than data has, and safe for every JSON reader."""


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        inside = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [item for items in inside for item in items if isinstance(item, dict | list | tuple)]
        if not level:
            break
    else:
        raise ValueError(f"it is nested more than {MAX_NESTING} levels deep")
    try:
        msgspec.msgpack.encode(value)
        msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"it cannot be stored as JSON with integers of 64 bits: {error}") from error
    return value


Json = Annotated[dict[str, Any], AfterValidator(_storable)]
"""Data for an environment: plain JSON, integers within 64 bits, at most ``MAX_NESTING`` levels deep."""

Tags = Annotated[list[Name], Field(max_length=MAX_TAGS)]
"""Words that sort tasks into kinds."""

CONSTRAINTS = frozenset({"json", "regex", "choice", "grammar"})
"""What an answer can be made to match."""

RUN_PROGRAMS = frozenset({"code", "python"})
"""Families of environments that run programs of the policy in a sandbox, also where they are wrapped by another."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class EnvironmentSpec(_Model):
    """One entry of the mixture that tasks are drawn from."""

    id: EnvironmentId
    """Environment id, such as ``game:GuessTheNumber-v0-hard``, of 1 to 200 characters."""
    kwargs: Json = {}
    """Passed to the environment's constructor."""
    weight: float = Field(default=1.0, gt=0)
    """Relative share of groups, a plain number. Default 1: equal shares."""
    tags: Tags = []
    """Words that a pull may ask for, such as ``["hard"]``. Default: none."""


class TaskSpec(_Model):
    """One task of a fixed list."""

    environment: EnvironmentId
    """Environment id, of 1 to 200 characters."""
    seed: int = Field(default=0, ge=0, le=MAX_INTEGER)
    """Seed of the environment, which fixes it whole. Default 0."""
    kwargs: Json = {}
    """Passed to the environment's constructor."""
    example: Json | None = None
    """A dataset row, passed to the constructor as ``example=``. Default: none."""
    id: str = ""
    """The submitter's name for the task. Default: its position in the list."""
    tags: Tags = []
    """Words that a pull may ask for, such as ``["hard"]``. Default: none."""


def _estimator_names(schema: dict[str, Any]) -> None:
    schema["enum"] = [NONE, *estimator_names()]


class EstimatorSpec(_Model):
    """How advantages are computed. Definitions: ``docs/estimators.md``."""

    name: str = Field(default="rebn", json_schema_extra=_estimator_names)
    """Which estimator. Default ReBN: it needs no groups and takes per-turn rewards and γ < 1."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per *turn*, never per token. Default 1: no discount."""
    ddof: Literal[0, 1] = 0
    """Delta degrees of freedom of σ. Default 0: population, as in GEM. 0 is required with token weighting."""
    eps: float = Field(default=1e-9, ge=0, lt=1)
    """Added to σ. Default 1e-9, as in GEM."""
    weighting: Literal["turn", "token"] = "turn"
    """Whether a turn counts once in μ and σ, or by its sampled tokens. Default: once."""

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, value: str) -> str:
        if value != NONE:
            try:
                find_estimator(value)
            except InvalidRequest as error:
                raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _ddof_fits(self) -> Self:
        token = self.weighting == "token" or (self.name != NONE and find_estimator(self.name).by_tokens)
        if token and self.ddof != 0:
            raise ValueError("ddof must be 0 with token weighting: token counts are weights, not samples")
        return self


class AdapterSpec(_Model):
    """A frozen LoRA adapter: an opponent, a reference, a judge."""

    name: Name
    """Its name in this run and at the servers, such as ``opponent-3``."""
    path: str = Field(min_length=1)
    """Its folder as PEFT writes it, by a path that the servers can read."""
    pinned: bool = False
    """Whether servers hold it all the time. Default no: the least recently used make room for others."""


def _plain_addresses(value: list[str]) -> list[str]:
    for endpoint in value:
        if canonical_address(endpoint).startswith(DNS_PREFIX):
            raise ValueError(
                f"{endpoint!r} is a name that stands for several servers; only policy.endpoints take those"
            )
    return value


Addresses = Annotated[list[str], Field(min_length=1), AfterValidator(_plain_addresses)]
"""Base addresses of servers that the orchestrator does not look after."""


class AgentSpec(_Model):
    """Who plays an agent of a multi-agent environment."""

    base: str | None = None
    """Name of the policy's weights; requests carry it as the model name. Default: the run's own."""
    endpoints: Addresses | None = None
    """Addresses of its servers. Default: the run's own."""
    adapters: list[Name] = []
    """Names of ``policy.adapters`` that play it, on the run's servers. Default: none, the policy itself plays."""
    routing: Literal["fixed", "round_robin"] = "fixed"
    """Which of the adapters plays in a group: always the first, or group after group the next one. All episodes of a
    group have the same. Default fixed."""
    train: bool = True
    """Whether its segments are rows. Default yes; a frozen opponent has ``train = false``."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature. Default: the run's own."""


class AdmissionSpec(_Model):
    """How many training episodes are at workers at a time: as many as the policy servers take by their own metrics.
    ``docs/policy.md`` has the rules."""

    adapt: bool = True
    """Whether it goes by that. Default yes, where ``policy.endpoints`` have vLLM's metrics. ``max_concurrent``
    bounds it in any case."""
    start: int = Field(default=32, ge=1, le=MAX_COUNT)
    """Episodes for each server before anything is known of it. Default 32: few enough for any engine."""
    floor: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Fewest episodes, whatever the servers say. Default 1."""
    ceiling: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Most episodes, whatever the servers say. Default none."""

    @model_validator(mode="after")
    def _floor_fits(self) -> Self:
        if self.ceiling is not None and self.ceiling < self.floor:
            raise ValueError(f"ceiling = {self.ceiling} is below floor = {self.floor}")
        return self


class SyncSpec(_Model):
    """How new weights get into the policy servers, where a version comes with them."""

    order: Literal["together", "rolling"] = "together"
    """All servers at once, or one after the other while the others serve. Default together: versions mix least."""
    pause: Literal["keep", "wait", "abort"] = "keep"
    """What becomes of requests that are under way: they go on from their tokens on the new weights; they are finished
    on the old ones first; or they are ended and begun again from what they have. Default keep."""
    pause_lease_s: float = Field(default=120.0, gt=0)
    """Seconds that a server is paused at most, loading included. Default 120. After that it goes on with what it holds;
    if nobody knows what that is, its requests are ended and go elsewhere."""


class ScorerSpec(_Model):
    """A policy that gives its logprobs of the tokens in a batch: a reference, or a teacher."""

    endpoints: Addresses
    """Base addresses of its servers. They must know ``prompt_logprobs`` on ``/v1/completions``, as vLLM does, and have
    room for one token more than the longest row."""
    model: str
    """The model name that requests carry."""


class PolicySpec(_Model):
    """The policy that acts in this run, and where it is served."""

    endpoints: list[str] = []
    """Base addresses of the servers, such as ``http://127.0.0.1:8471``; or names such as ``dns+http://vllm:8000``, each
    of which stands for the servers at all addresses that it resolves to. Default: what each worker was started with."""
    model: str = "policy"
    """The model name that requests carry."""
    base: str = "policy"
    """Name of the weights, as trajectories record it."""
    protocol: Literal["auto", "generate", "completions", "chat"] = "auto"
    """How the servers are asked: vLLM's ``/inference/v1/generate`` (which says what version sampled each token),
    ``/v1/completions``, or ``/v1/chat/completions``. Default: the first of these that a server has."""
    logprobs: Literal["raw", "processed"] = "raw"
    """What the servers' log-probabilities are: of the policy itself, or after temperature and filters (vLLM's
    ``--logprobs-mode``). It is recorded with every row. Default: raw, as vLLM's own."""
    interrupted: Literal["continue", "restart"] = "continue"
    """A turn that the engine ended for new weights goes on from its tokens, on the new weights, or is sampled again.
    Default: it goes on, and nothing is lost."""
    renderer: str = "bytes"
    """Turns messages into tokens: ``bytes``; ``template``, the chat template of the model; a model family, such as
    ``qwen3``; or ``auto``, the model's family if it is known, else its template. Default: the byte-level one."""
    tokenizer: str = ""
    """The model's folder, as it is on the workers, or its name on the hub. Every renderer but ``bytes`` needs it."""
    renderer_options: Json = {}
    """Variables of the chat template, or fields of the family's configuration, such as ``{"enable_thinking": false}``.
    Default: none."""
    admission: AdmissionSpec = AdmissionSpec()
    """How many episodes its servers get at a time."""
    sync: SyncSpec = SyncSpec()
    """How new weights get into its servers."""
    adapter: Name | None = None
    """Name of the LoRA adapter that is trained: versions are announced with weights of kind ``adapter``. Default: none,
    the base itself is trained."""
    adapters: list[AdapterSpec] = []
    """Frozen adapters that agents play with. Default: none."""
    max_adapters: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Adapters that each server holds at a time; pinned ones and those in use may be more. Default: what a server runs
    at a time, as its metrics say (vLLM's ``--max-loras``)."""
    agents: dict[str, AgentSpec] = {}
    """Overrides by agent name, for environments with several agents. Default: this policy plays all, and trains."""
    scorers: dict[Name, ScorerSpec] = {}
    """Policies whose logprobs of every token of a row come with it, as the array ``logprobs.NAME``. Default: none."""

    @model_validator(mode="after")
    def _renderer_has_what_it_needs(self) -> Self:
        if self.renderer != "bytes" and not self.tokenizer:
            raise ValueError(f"renderer = {self.renderer!r} needs a tokenizer: the model's folder, or its name")
        if self.renderer == "bytes" and (self.tokenizer or self.renderer_options):
            raise ValueError("renderer = 'bytes' has no tokenizer and no options; set renderer to 'auto' or 'template'")
        return self

    @model_validator(mode="after")
    def _adapters_are_known(self) -> Self:
        names = [adapter.name for adapter in self.adapters]
        if len({*names, self.adapter}) < len(names) + 1:
            raise ValueError("adapters have names of their own")
        if (names or self.adapter) and not self.endpoints:
            raise ValueError("adapters are loaded into the servers of the run: name them in policy.endpoints")
        for name, agent in self.agents.items():
            unknown = [adapter for adapter in agent.adapters if adapter not in names]
            if unknown:
                raise ValueError(f"agent {name!r} plays with {unknown[0]!r}, which is none of policy.adapters")
            if agent.adapters and (agent.train or agent.endpoints is not None or agent.base is not None):
                raise ValueError(
                    f"agent {name!r} plays with frozen adapters: it needs train = false, and no base or endpoints"
                )
        return self

    @field_validator("endpoints")
    @classmethod
    def _endpoints_are_addresses(cls, value: list[str]) -> list[str]:
        for endpoint in value:
            canonical_address(endpoint)
        return value


class SamplingSpec(_Model):
    """How tokens are drawn."""

    temperature: float = Field(default=1.0, ge=0)
    """Temperature, a plain number. Default 1: logprobs are those of the policy itself. 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass. Default 1: no cut."""
    max_tokens: int = Field(default=512, ge=1, le=MAX_COUNT)
    """Most tokens a turn may sample. Default 512."""
    stop: list[str] = []
    """Stop strings. Default: only the renderer's end-of-turn token."""
    structured_outputs: Json | None = None
    """What every answer must match, as vLLM has it: ``{"json": SCHEMA}``, or with ``regex``, ``choice`` or ``grammar``.
    Default: anything goes."""

    @field_validator("structured_outputs")
    @classmethod
    def _one_constraint(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and (len(value) != 1 or not value.keys() <= CONSTRAINTS):
            raise ValueError(f"give one of {', '.join(sorted(CONSTRAINTS))}, and nothing else")
        return value


class LimitSpec(_Model):
    """Budgets (their end truncates an episode) and deadlines (their end fails it)."""

    max_turns: int = Field(default=64, ge=1, le=MAX_COUNT)
    """Most turns of an episode, all agents together. Default 64."""
    max_context_tokens: int = Field(default=32768, ge=1, le=MAX_COUNT)
    """Most tokens of a segment, prompt included. Default 32768."""
    working_time_s: float = Field(default=600.0, gt=0)
    """Working time of an episode in seconds, waits not counted. Default 600."""
    environment_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one reset or step in seconds. Default 60. Its end is an environment failure."""
    policy_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of one policy request in seconds. Default 300. Its end is a policy failure."""
    episode_timeout_s: float = Field(default=3600.0, gt=0)
    """Wall-clock deadline of an attempt in seconds. Default 3600. Its end is an infrastructure failure."""


class RetrySpec(_Model):
    """What happens when an attempt fails.

    The loss of a worker (spot, a crash) is not the task's fault: what it held is queued again, draws on no budget and
    counts for no quarantine. Only an episode that lost ten times ``max_attempts`` workers ends for good at the next, as
    infrastructure/``lease-expired``, so that a task that crashes its worker ends; that counts once a worker.
    """

    max_attempts: int = Field(default=3, ge=1, le=100)
    """Attempts of an episode, the first included, that may fail retryably or be dropped by a worker that lives. Default
    3."""
    quarantine_after: int = Field(default=3, ge=1, le=MAX_COUNT)
    """Attempts that a task may kill (over all its episodes) before it is quarantined. A policy server that is away
    kills none; one that answers with what is no sample does. Default 3."""


def _selection_rule_names(schema: dict[str, Any]) -> None:
    schema["enum"] = selection_rule_names()


class SelectionSpec(_Model):
    """Which eligible groups a batch takes. ``docs/selection.md`` has the rules in full."""

    order: str = Field(default="fifo", json_schema_extra=_selection_rule_names)
    """First or last dispatched first, or drawn without replacement: evenly, or by priority. Default fifo: by dispatch
    order, since the order of completion would favour short episodes."""
    exponent: float = Field(default=1.0, ge=0, le=MAX_EXPONENT)
    """Prioritized only: a group is drawn in proportion to its priority to the power of this. Default 1; 0 is
    uniform."""

    @field_validator("order")
    @classmethod
    def _order_is_known(cls, value: str) -> str:
        try:
            find_selection_rule(value)
        except InvalidRequest as error:
            raise ValueError(str(error)) from error
        return value


class RunSpec(_Model):
    """A run. Give ``environments`` (a mixture), ``tasks`` (a fixed list), or neither (the learner submits groups)."""

    name: Name
    """Name of the run; unique in a data directory."""
    environments: list[EnvironmentSpec] = []
    """The mixture that tasks are drawn from without end. Default: none."""
    tasks: list[TaskSpec] | None = None
    """A fixed list of tasks, in this order. Default: none."""
    epochs: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Times that the fixed list is gone through. Default 1."""
    seed: int = Field(default=0, ge=0, le=MAX_INTEGER)
    """Seed of everything that the run draws. Default 0."""
    group_size: int = Field(default=1, ge=1, le=4096)
    """Episodes of a group. Default 1: estimators without groups need no more."""
    batch_size: int = Field(default=32, ge=1, le=MAX_COUNT)
    """Episodes of a batch; a batch is ⌈batch_size / group_size⌉ whole groups. Default 32."""
    batch_tokens: int | None = Field(default=None, ge=1, le=MAX_INTEGER)
    """Budget of a batch in tokens of its rows; replaces ``batch_size`` if given. Default: none."""
    bin_tokens: int | None = Field(default=None, ge=1, le=MAX_INTEGER)
    """Tokens of a bin. The rows of a batch are packed into bins of at most so many, first-fit-decreasing; the batch
    names the bin of each row. A group with a longer row is retired. Default none: each row is a bin of its own."""
    max_staleness: int = Field(default=1, ge=0, le=MAX_COUNT)
    """Versions that a group's oldest row may be behind when its batch is formed. Default 1: one step of overlap."""
    max_uses: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Times that a group is served and acked. Default 1."""
    max_concurrent: int = Field(default=4096, ge=1, le=MAX_COUNT)
    """Most episodes dispatched at a time. Default 4096; admission is bounded by staleness, not by this."""
    max_bytes: int = Field(default=4 << 30, ge=1, le=MAX_INTEGER)
    """Bytes that groups in flight may hold, reservations included. Default 4 GiB."""
    selection: SelectionSpec = SelectionSpec()
    """Which eligible groups a batch takes."""
    partial_batches: bool = True
    """Whether the last batch of a fixed list may be smaller. Default yes, with its true size in the manifest."""
    short_groups: Literal["top_up", "serve", "drop"] = "top_up"
    """A group whose member failed for good gets a fresh member while staleness allows, is served with its true size, or
    is dropped and another admitted instead: only complete ones are served. Default: top-up."""
    partial_after_s: float | None = Field(default=None, gt=0)
    """Seconds that a group waits for the rest of its members once the first one ended. Then those are stopped, and it
    is served with its true size. Default none: it waits for all."""
    zero_variance: Literal["keep", "drop", "replace"] = "keep"
    """Groups whose returns are all equal: served; dropped, so that the batch is smaller by them; or dropped and
    replaced by others in the same batch. Default: served."""
    max_replaced: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Zero-variance groups that are replaced for one batch; those after them are served. Default none: three times the
    groups of a batch."""
    estimator: EstimatorSpec = EstimatorSpec()
    """How advantages are computed."""
    policy: PolicySpec = PolicySpec()
    """Who acts."""
    sampling: SamplingSpec = SamplingSpec()
    """How tokens are drawn."""
    limits: LimitSpec = LimitSpec()
    """Budgets and deadlines."""
    retries: RetrySpec = RetrySpec()
    """Attempts and quarantine."""
    pool: Name = "default"
    """Pool of workers that may run it. Default ``default``."""
    capabilities: list[str] = []
    """What a worker must offer, such as ``["reasoning-gym"]``. Default: nothing beyond ``sandbox``, which environments
    of the families ``code`` and ``python`` ask for."""
    attempt_lease_s: float = Field(default=30.0, gt=0)
    """Term of an attempt lease in seconds; a worker's heartbeat renews it. Default 30."""
    batch_lease_s: float = Field(default=300.0, gt=0)
    """Term of a batch lease in seconds; the learner's word of what it is doing renews it. Default 300."""
    evaluation_slots: float = Field(default=0.25, ge=0, le=1)
    """Share of slots that evaluation episodes may take from training when both want them. Default a quarter."""

    @field_validator("environments")
    @classmethod
    def _weights_are_finite(cls, value: list[EnvironmentSpec]) -> list[EnvironmentSpec]:
        if value and not math.isfinite(sum(entry.weight for entry in value)):
            raise ValueError("the weights do not add up to a finite number")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.environments and self.tasks is not None:
            raise ValueError("give environments (a mixture) or tasks (a fixed list), not both")
        if self.partial_after_s is not None and self.short_groups == "drop":
            raise ValueError("partial_after_s serves groups that are not complete; short_groups = 'drop' never does")
        if self.max_replaced is not None and self.zero_variance != "replace":
            raise ValueError("max_replaced bounds zero_variance = 'replace'; this run replaces nothing")
        if self.tasks is None and self.epochs != 1:
            raise ValueError("epochs belongs to a fixed list of tasks; a mixture has no end")
        return self

    @property
    def source(self) -> Literal["mixture", "list", "learner"]:
        """Where this run's tasks come from."""
        if self.tasks is not None:
            return "list"
        return "mixture" if self.environments else "learner"

    @property
    def needed_capabilities(self) -> frozenset[str]:
        """What a worker must offer: what the run names, and what its environments need. Of tasks that the learner
        submits later nothing is known here."""
        ids = [entry.id for entry in self.environments] + [task.environment for task in self.tasks or []]
        needs = {"sandbox"} if any(RUN_PROGRAMS.intersection(name.split(":")[:-1]) for name in ids) else set()
        return frozenset({*self.capabilities, *needs})

    @property
    def batch_groups(self) -> int:
        """Groups of a batch, ⌈batch_size / group_size⌉ (for a token budget: the least, 1)."""
        return 1 if self.batch_tokens is not None else math.ceil(self.batch_size / self.group_size)


def parse_run_spec(value: Any) -> RunSpec:
    """A RunSpec from JSON-able data; raises InvalidRunSpec that names every bad field and what is allowed."""
    try:
        return RunSpec.model_validate(value)
    except ValidationError as error:
        problems = [
            {"field": ".".join(str(part) for part in item["loc"]) or "(spec)", "problem": item["msg"]}
            for item in error.errors(include_url=False, include_input=False, include_context=False)
        ]
        text = "; ".join(f"{item['field']}: {item['problem']}" for item in problems)
        raise InvalidRunSpec(
            f"The run spec is not valid: {text}.",
            hint="`headrace run --schema` prints every field with its unit and default.",
            problems=problems,
        ) from error

"""The example learner: it learns, the control does not, and a kill at any point trains no batch twice."""

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from headrace import Version
from headrace.errors import BatchAlreadyAcked
from headrace.runspec import parse_run_spec
from headrace_workers.environments.guess_the_number import GuessTheNumber
from headrace_workers.renderers.bytes_renderer import END
from headrace_workers.tiny_policy.model import SIZE, neutral_weights
from headrace_workers.tiny_policy.policy import TinyPolicy
from headrace_workers.tiny_policy.sampler import SamplerSettings
from tests.workers.tiny_policy.prompts import prompt_of

EXAMPLES = Path(__file__).parents[3] / "examples"
GAMMA = 0.9


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"headrace_example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


learner = example("learner")


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def play(policy: TinyPolicy, seed: int) -> SimpleNamespace:
    """One episode as a row, with its discounted return as the advantage of each turn."""
    environment = GuessTheNumber(1, 50, 15, success_only=True)
    texts, turns, done = [environment.reset(seed)[0]], [], False
    ids = prompt_of(*texts)
    while not done:
        made = policy.generate(ids, SamplerSettings(max_tokens=32, stop_token_ids=[END]), seed=seed)[0][0]
        turns.append(SimpleNamespace(start=len(ids), end=len(ids) + len(made.token_ids)))
        step = environment.step(made.text)
        done = step.terminated
        texts += [made.text, str(step.observation)]
        ids = [*ids, *made.token_ids, *prompt_of(str(step.observation))[1:]]
    row_ids = np.array(ids, dtype=np.int32)
    returns = [step.reward * GAMMA ** (len(turns) - 1 - at) for at in range(len(turns))]
    return SimpleNamespace(token_ids=row_ids, turns=turns, advantages=np.array(returns))


def form(number: int, weights: np.ndarray, version: Version, episodes: int) -> SimpleNamespace:
    """A batch as the service would freeze it: advantages whitened over all its turns."""
    policy = TinyPolicy(weights=weights, version=version)
    rows = [play(policy, 1000 * number + episode) for episode in range(episodes)]
    every = np.concatenate([row.advantages for row in rows])
    for row in rows:
        row.advantages = (row.advantages - every.mean()) / (every.std() + 1e-9)
    counts = SimpleNamespace(turns=len(every), trajectories=len(rows))
    manifest = SimpleNamespace(counts=counts, moments=SimpleNamespace(rewards=SimpleNamespace(mean=1.0)))
    return SimpleNamespace(id=f"batch-{number}", rows=rows, version=version, manifest=manifest)


class Service:
    """The service as the learner sees it: freezes a batch until it is acked. Dies at call ``dies_at``."""

    def __init__(self, policy: TinyPolicy, episodes: int = 4) -> None:
        self.policy = policy
        self.episodes = episodes
        self.version = Version(0, 0)
        self.acked: list[tuple[str, Version]] = []
        self._batch: SimpleNamespace | None = None
        self.calls = 0
        self.dies_at = 0

    def life(self) -> None:
        self.calls += 1
        if self.calls == self.dies_at:
            raise Killed

    def run(self, run):
        self.life()
        return SimpleNamespace(version=str(self.version))

    def pull(self, run):
        self.life()
        if self._batch is None:
            self._batch = form(len(self.acked), self.policy.weights, self.version, self.episodes)
        self.life()
        return self._batch

    def doing(self, run, doing):
        self.life()

    def hold(self, run, wait_s):
        self.life()
        return SimpleNamespace(hold_s=0.0)

    def ack(self, batch, version):
        self.life()
        if self._batch is None or self._batch.id != batch.id:
            raise BatchAlreadyAcked("acked before")
        self.acked.append((batch.id, version))
        self.version, self._batch = version, None
        self.life()


@pytest.fixture
def service(monkeypatch) -> Service:
    made = Service(TinyPolicy())

    def load(address, state):
        made.life()
        made.policy.load(state.weights, state.version)
        made.life()

    def write(checkpoint, state, save=learner._write):
        made.life()
        save(checkpoint, state)
        made.life()

    monkeypatch.setattr(learner, "load", load)
    monkeypatch.setattr(learner, "fetch", lambda address: learner.State(neutral_weights(), Version(0, 0), ""))
    monkeypatch.setattr(learner, "_write", write)
    return made


VERSIONS = 3


def undisturbed(service: Service, checkpoint: Path) -> tuple[np.ndarray, list]:
    list(learner.train(service, "run", "policy", VERSIONS, checkpoint))
    return service.policy.weights, service.acked


def test_a_kill_at_any_point_trains_no_batch_twice_and_loses_none(service, tmp_path, monkeypatch):
    expected, acked = undisturbed(service, tmp_path / "undisturbed.npz")
    calls = service.calls
    assert acked == [(f"batch-{at}", Version(0, at + 1)) for at in range(VERSIONS)]
    for dies_at in range(1, calls + 1):
        service.__init__(TinyPolicy())
        service.dies_at = dies_at
        checkpoint = tmp_path / f"{dies_at}.npz"
        with pytest.raises(Killed):
            list(learner.train(service, "run", "policy", VERSIONS, checkpoint))
        list(learner.train(service, "run", "policy", VERSIONS, checkpoint))
        assert service.acked == acked
        assert np.array_equal(service.policy.weights, expected)


def test_after_a_restart_a_policy_server_that_lost_its_weights_gets_those_of_the_checkpoint(service, tmp_path):
    expected, _ = undisturbed(service, tmp_path / "c.npz")
    service.policy.load(neutral_weights(), Version(0, 0))
    assert list(learner.train(service, "run", "policy", VERSIONS, tmp_path / "c.npz")) == []
    assert service.policy.version == Version(0, VERSIONS)
    assert np.array_equal(service.policy.weights, expected)


def test_the_learner_learns_to_guess_and_the_control_does_not(service):
    service.episodes = 32
    steps = list(learner.train(service, "run", "policy", 25))
    assert [step["version"] for step in steps] == [f"0.{n}" for n in range(1, 26)]
    assert np.mean([step["mean_guesses"] for step in steps[-5:]]) < 5.6 < steps[0]["mean_guesses"]
    service.__init__(TinyPolicy())
    list(learner.train(service, "run", "policy", 3, control=True))
    assert not service.policy.weights.any()
    assert service.version == Version(0, 3)


def test_weights_travel_over_http_unchanged(server):
    weights = np.random.default_rng(1).normal(size=SIZE)
    neutral = learner.fetch(server)
    try:
        learner.load(server, learner.State(weights, Version(0, 7), "batch"))
        state = learner.fetch(server)
        assert np.array_equal(state.weights, weights)
        assert (state.version, state.batch) == (Version(0, 7), "")
    finally:
        learner.load(server, neutral)


def test_a_checkpoint_can_be_read_and_is_replaced_atomically(tmp_path):
    state = learner.State(np.arange(4.0), Version(1, 2), "batch-9")
    learner._write(tmp_path / "c.npz", learner.State(np.zeros(4), Version(0, 0), ""))
    learner._write(tmp_path / "c.npz", state)
    read = learner._read(tmp_path / "c.npz")
    assert np.array_equal(read.weights, state.weights)
    assert read[1:] == state[1:]
    assert [file.name for file in tmp_path.iterdir()] == ["c.npz"]


def test_the_run_spec_of_the_example_is_valid():
    spec = parse_run_spec(json.loads((EXAMPLES / "guess_the_number.json").read_text()))
    assert (spec.estimator.name, spec.estimator.gamma) == ("rebn", GAMMA)


def test_without_a_policy_the_learner_ends_with_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["learner.py", "--policy", "http://127.0.0.1:1"])
    with pytest.raises(SystemExit, match=r"^The policy at http://127.0.0.1:1 does not answer: .*refused") as ended:
        learner.main()
    assert "\n" not in str(ended.value)


def test_the_learner_fits_on_two_screens():
    assert len((EXAMPLES / "learner.py").read_text().splitlines()) < 120


def test_expected_guesses_are_exact(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    study = example("gamma_study")
    assert study.expected_guesses(50, binary=False) == pytest.approx(6.18, abs=0.005)
    assert study.expected_guesses(50, binary=True) == pytest.approx(4.86, abs=0.005)
    rng, count = random.Random(0), 7
    played = []
    for _ in range(20000):
        secret, low, high, guesses = rng.randint(1, count), 1, count, 0
        while True:
            guess, guesses = rng.randint(low, high), guesses + 1
            if guess == secret:
                break
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        played.append(guesses)
    assert study.expected_guesses(count, binary=False) == pytest.approx(np.mean(played), abs=0.05)

"""Effect of the discount γ on learning: mean guesses in guess the number with success-only reward.

    python examples/gamma_study.py                       # starts its own service, takes several minutes
    python examples/gamma_study.py --url http://127.0.0.1:8470 --policy http://127.0.0.1:8471

Each point is a separate run of the service: it starts from neutral weights, trains with ``learner.py``, and is
evaluated by sampling (temperature 1) over all 50 secrets. γ is per turn. With γ = 1 every success earns the same reward
however late it comes, so fewer guesses earn no more; the smaller γ is, the more a late success loses. The table goes to
standard output, the plot to ``build/gamma_study.png`` (needs ``headrace[plots]``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import learner  # beside this file

from headrace import Client, Version
from headrace_workers.tiny_policy.model import neutral_weights

GAMMAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
LOW, HIGH = 1, 50
EPISODES_PER_SECRET = 4  # 200 evaluation episodes reduce the standard error to 0.1 guesses
STOP_S = 60.0  # longest wait for the service to end
Means = dict[float, list[float]]


def expected_guesses(count: int, *, binary: bool) -> float:
    """Return the exact mean guesses for one of ``count`` numbers, by binary search or uniform guessing."""
    total = [0.0]  # guesses summed over all secrets of an interval of n numbers
    for n in range(1, count + 1):
        by_guess = [total[at] + total[n - 1 - at] for at in range(n)]
        total.append(n + (min(by_guess) if binary else statistics.fmean(by_guess)))
    return total[count] / count


def study(client: Client, policy: str, spec: dict[str, Any], versions: int, seeds: int) -> Means:
    """Train a policy for each γ and seed; return its mean guesses, by γ."""
    means: Means = {}
    for gamma in GAMMAS:
        for seed in range(seeds):
            run = f"gamma-{gamma:g}-seed-{seed}"
            learner.load(policy, learner.State(neutral_weights(), Version(0, 0), ""))
            client.create_run({**spec, "name": run, "seed": seed, "estimator": {"name": "rebn", "gamma": gamma}})
            for _ in learner.train(client, run, policy, versions):
                pass
            means.setdefault(gamma, []).append(evaluate(client, run, spec["environments"][0]))
            client.close_run(run)
            print(f"γ {gamma:g}, seed {seed}: {means[gamma][-1]:.2f} guesses", flush=True)
    return means


def evaluate(client: Client, run: str, environment: dict[str, Any]) -> float:
    """Return the mean guesses over all secrets; a game that was not won counts with all its guesses."""
    tasks = [
        {"environment": environment["id"], "seed": secret, "kwargs": {**environment["kwargs"], "target": secret}}
        for secret in range(LOW, HIGH + 1)
    ]
    reply = client.evaluate(run, tasks, episodes_per_task=EPISODES_PER_SECRET, temperature=1.0)
    failed = sum(episode.failure is not None for episode in reply.episodes)
    if failed or reply.done < reply.wanted:
        raise SystemExit(f"{run}: {failed} of {reply.wanted} evaluation episodes failed, {reply.done} ended.")
    return statistics.fmean(episode.turns for episode in reply.episodes)


def show(means: Means) -> None:
    print("\n| γ | mean guesses | lowest | highest |\n| --- | --- | --- | --- |")
    for gamma, values in means.items():
        print(f"| {gamma:g} | {statistics.fmean(values):.2f} | {min(values):.2f} | {max(values):.2f} |")
    for name, binary in (("uniform guessing", False), ("binary search", True)):
        print(f"| {name} | {expected_guesses(HIGH - LOW + 1, binary=binary):.2f} | | |")


def plot(means: Means, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    ticks = range(len(means))
    for tick, values in zip(ticks, means.values(), strict=True):
        axes.plot([tick] * len(values), values, "o", color="tab:blue", alpha=0.5)
    axes.plot(ticks, [statistics.fmean(values) for values in means.values()], color="tab:blue", label="trained")
    for name, binary, style in (("uniform guessing", False, "--"), ("binary search", True, ":")):
        mean = expected_guesses(HIGH - LOW + 1, binary=binary)
        axes.axhline(mean, color="gray", linestyle=style, label=f"{name} ({mean:.2f})")
    axes.set(xlabel="γ per turn", ylabel="mean guesses, 1 to 50", xticks=list(ticks))
    axes.set_xticklabels([f"{gamma:g}" for gamma in means])
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    print(f"\nPlot: {file}")


@contextmanager
def own_service() -> Iterator[tuple[str, str]]:
    """Run ``headrace up`` with the tiny policy; yield the addresses of both."""
    with tempfile.TemporaryDirectory(prefix="headrace-gamma-") as data:
        command = ["-m", "headrace_orchestrator.cli", "up", "--tiny-policy", "--port", "0", "--data", data, "--json"]
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            lines = (json.loads(line) for line in process.stdout)
            started = next((line for line in lines if "url" in line), None)
            if started is None:
                raise SystemExit("The service did not start; see the messages above.")
            yield started["url"], started["policy_endpoint"]
        finally:
            process.terminate()
            process.communicate(timeout=STOP_S)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mean guesses against the discount γ.")
    parser.add_argument("--url", help="address of a running orchestrator (default: start one)")
    parser.add_argument("--policy", default="http://127.0.0.1:8471", help="address of its tiny policy, with --url")
    parser.add_argument("--versions", type=int, default=40, help="versions per run")
    parser.add_argument("--seeds", type=int, default=3, help="runs per γ")
    parser.add_argument("--plot", type=Path, default=Path("build/gamma_study.png"), help="file for the plot")
    options = parser.parse_args()
    spec = json.loads((Path(__file__).parent / "guess_the_number.json").read_text())
    if options.url:
        with Client(options.url, learner="gamma-study") as client:
            means = study(client, options.policy, spec, options.versions, options.seeds)
    else:
        with own_service() as (url, policy), Client(url, learner="gamma-study") as client:
            means = study(client, policy, spec, options.versions, options.seeds)
    show(means)
    plot(means, options.plot)


if __name__ == "__main__":
    main()

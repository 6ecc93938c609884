"""Train a transformer with random weights on this machine, with PyTorch and a real vLLM, and plot the result.

    make parts             # once: vLLM and torch
    make train-demo        # options, for example: ARGS="--seed 1 --versions 40"

Starts an orchestrator, a worker, vLLM and the learner of ``train_torch.py`` as separate processes, and ends them all.
The model is a Qwen3 of two layers; the game is ``kinds.py``. The table goes to standard output, progress to standard
error, the plot to ``build/train_demo.png``. The exit code is 1 if the reward did not double.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import tiny_model  # in this file's folder, like the next
import vllm_server

from headrace import Client
from headrace.errors import HeadraceError
from headrace_orchestrator.cli.processes import components
from headrace_orchestrator.cli.processes.supervisor import Component, ProcessSupervisor

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
SLOTS = 64
FIRST, LAST = 5, 5  # versions whose means are compared
MIN_RISE = 2.0  # ratio of the last to the first reward
POLL_S = 0.2
COLUMNS = {
    "version": "{}",
    "reward": "{:.2f}",
    "turns": "{:.2f}",
    "entropy": "{:.2f}",
    "staleness": "{:.2f}",
    "ratio": "{:.3f}",
    "capped": "{:.1%}",
    "waited_s": "{:.1f}",
    "trained_s": "{:.1f}",
}
Steps = list[dict[str, Any]]

# As short as possible: an untrained model first has to learn which part of its prompt has information.
CHAT_TEMPLATE = """\
{%- for message in messages -%}<|im_start|>{{ message.content }}<|im_end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>{%- endif -%}
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_demo(folder: Path, versions: int, seed: int) -> Iterator[dict[str, Any]]:
    """Start all processes and yield the figures of each version; closing the iterator ends the processes."""
    for old in ("model", "data", "checkpoints", "logs"):
        shutil.rmtree(folder / old, ignore_errors=True)
    model, logs = folder / "model", folder / "logs"
    logs.mkdir(parents=True)
    tiny_model.write_model(model, seed=seed, hidden=128, spread=0.06)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    say(f"vLLM is starting, which takes half a minute to three minutes (logs: {logs})")
    vllm = vllm_server.start_vllm(model, "--max-model-len", "512", log=logs / "vllm.log", say=say)
    with vllm as address, ProcessSupervisor(logs) as fleet:
        spec = json.loads((HERE / "kinds.json").read_text())
        spec |= {"seed": seed, "policy": {"renderer": "template", "tokenizer": str(model), "endpoints": [address]}}
        url = start_service(fleet, folder / "data")
        with Client(url, keepalive=False) as client:
            client.create_run(spec)
        arguments = ["--url", url, "--run", spec["name"], "--model", str(model), "--versions", str(versions)]
        fleet.start(learner(*arguments, "--checkpoints", str(folder / "checkpoints"), "--json"))
        say(f"The learner is starting; the console is at {url}/")
        yield from figures(fleet)


def start_service(fleet: ProcessSupervisor, data: Path) -> str:
    """Start an orchestrator, and a worker that imports the game; return the address."""
    port = components.free_port()
    url = f"http://127.0.0.1:{port}"
    fleet.start(components.orchestrator(data, host="127.0.0.1", port=port))
    components.await_answer(fleet, "orchestrator", port, "/readyz")
    game = str(HERE / "kinds.py")
    fleet.start(components.worker("worker", url, slots=SLOTS, policy_endpoint="", grace_s=0.0, imports=[game]))
    return url


def learner(*arguments: str) -> Component:
    """Describe the learner's process, which runs in the environment with torch."""
    return Component(
        name="learner",
        command=[str(vllm_server.PYTHON), str(HERE / "train_torch.py"), *arguments],
        environment={"OMP_NUM_THREADS": "1"},
        stage=components.LEARNER_STAGE,
        restart=False,
    )


def figures(fleet: ProcessSupervisor) -> Iterator[dict[str, Any]]:
    """Yield the figures that the learner prints, until it ends."""
    with fleet.log_file("learner").open() as log:
        text, ended = "", False
        while not ended:
            ended = fleet.exit_code("learner") is not None
            text += log.read()
            *lines, text = text.split("\n")
            yield from (json.loads(line) for line in lines if line.startswith("{"))
            fleet.poll()
            time.sleep(POLL_S)
    if fleet.exit_code("learner") != 0:
        raise SystemExit(f"The learner failed. The end of its log:\n{fleet.tail('learner')}")


def line(step: dict[str, Any]) -> str:
    return "  ".join(f"{form.format(step[name]):>{len(name)}}" for name, form in COLUMNS.items())


def plot(steps: Steps, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(4, sharex=True, figsize=(6, 8), layout="constrained")
    labels = {"reward": "reward of an episode", "entropy": "entropy, nats a token", "staleness": "versions behind"}
    for axes, (name, label) in zip(rows, {**labels, "ratio": "importance ratio"}.items(), strict=True):
        axes.plot(range(1, len(steps) + 1), [step[name] for step in steps], color="tab:blue")
        axes.set_ylabel(label)
    rows[-1].set_xlabel("version")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def summary(steps: Steps, seconds: float) -> dict[str, Any]:
    first, last = ([step["reward"] for step in part] for part in (steps[:FIRST], steps[-LAST:]))
    means = {name: statistics.fmean(step[name] for step in steps) for name in ("staleness", "ratio", "capped")}
    rewards = {"first_reward": statistics.fmean(first), "last_reward": statistics.fmean(last)}
    return {"versions": len(steps), "seconds": seconds, **rewards, **means}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny transformer with PyTorch and vLLM.")
    parser.add_argument("--versions", type=int, default=120, help="steps of the learner")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model's weights and of the run")
    parser.add_argument("--folder", type=Path, default=BUILD / "train_demo", help="working folder, which is emptied")
    parser.add_argument("--plot", type=Path, default=BUILD / "train_demo.png", help="file for the plot")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each version, and one for the result")
    options = parser.parse_args()
    started_at = time.monotonic()
    steps: Steps = []
    try:
        with closing(run_demo(options.folder.resolve(), options.versions, options.seed)) as running:
            for step in running:
                if not options.json and not steps:
                    print("  ".join(COLUMNS))
                steps.append(step)
                print(json.dumps(step) if options.json else line(step), flush=True)
    except (FileNotFoundError, vllm_server.StartFailed, HeadraceError) as error:
        raise SystemExit(str(error)) from error
    result = summary(steps, time.monotonic() - started_at)
    plot(steps, options.plot)
    text = (
        "{versions} versions in {seconds:.0f} s: reward {first_reward:.2f} → {last_reward:.2f}, "
        "staleness {staleness:.2f}, importance ratio {ratio:.3f}, {capped:.1%} of tokens capped."
    )
    print(
        json.dumps({**result, "plot": str(options.plot)})
        if options.json
        else f"\n{text.format(**result)}\nPlot: {options.plot}"
    )
    if result["last_reward"] < MIN_RISE * result["first_reward"]:
        raise SystemExit("The reward did not double.")


if __name__ == "__main__":
    main()

"""Train a transformer that knows nothing with PyTorch and a real vLLM, on this machine, and plot what came of it.

    make parts             # once: vLLM and torch
    make train-demo        # ARGS="--seed 1 --versions 40" for another

Starts an orchestrator, a worker, vLLM and the learner of ``train_torch.py``, each a process of its own, and ends them
all. The model is a Qwen3 of two layers with random weights; the game is ``kinds.py``. The table goes to standard
output, news to standard error, the plot to ``build/train_demo.png``. It ends with 1 if the reward did not double.
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

import tiny_model  # beside this file, as is the next
import vllm_server

from headrace import Client
from headrace.errors import HeadraceError
from headrace_orchestrator.cli.processes import components
from headrace_orchestrator.cli.processes.supervisor import Component, ProcessSupervisor

HERE = Path(__file__).parent
BUILD = HERE.parent / "build"
SLOTS = 64
FIRST, LAST = 5, 5  # versions whose means are compared
RISE = 2.0  # what counts as learned
LOOK_S = 0.2
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

# As short as can be: a model that knows nothing has to learn first where in its prompt anything is said.
CHAT_TEMPLATE = """\
{%- for message in messages -%}<|im_start|>{{ message.content }}<|im_end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>{%- endif -%}
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_demo(folder: Path, versions: int, seed: int) -> Iterator[dict[str, Any]]:
    """Everything that runs, for as long as it is iterated; gives the figures of each version."""
    for old in ("model", "data", "checkpoints", "logs"):
        shutil.rmtree(folder / old, ignore_errors=True)
    model, logs = folder / "model", folder / "logs"
    logs.mkdir(parents=True)
    tiny_model.write_model(model, seed=seed, hidden=128, spread=0.06)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    say(f"vLLM is starting; that takes half a minute to three minutes (logs: {logs})")
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
    """An orchestrator and a worker that knows the game; gives the address."""
    port = components.free_port()
    url = f"http://127.0.0.1:{port}"
    fleet.start(components.orchestrator(data, host="127.0.0.1", port=port))
    components.await_answer(fleet, "orchestrator", port, "/readyz")
    game = str(HERE / "kinds.py")
    fleet.start(components.worker("worker", url, slots=SLOTS, policy_endpoint="", grace_s=0.0, imports=[game]))
    return url


def learner(*arguments: str) -> Component:
    """The learner, where torch is."""
    return Component(
        name="learner",
        command=[str(vllm_server.PYTHON), str(HERE / "train_torch.py"), *arguments],
        environment={"OMP_NUM_THREADS": "1"},
        stage=components.LEARNER_STAGE,
        restart=False,
    )


def figures(fleet: ProcessSupervisor) -> Iterator[dict[str, Any]]:
    """What the learner prints, line by line, until it ends."""
    with fleet.log_file("learner").open() as log:
        text, ended = "", False
        while not ended:
            ended = fleet.exit_code("learner") is not None
            text += log.read()
            *lines, text = text.split("\n")
            yield from (json.loads(line) for line in lines if line.startswith("{"))
            fleet.poll()
            time.sleep(LOOK_S)
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
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights and of the run")
    parser.add_argument(
        "--folder",
        type=Path,
        default=BUILD / "train_demo",
        help="for what it makes, instead of what is there",
    )
    parser.add_argument("--plot", type=Path, default=BUILD / "train_demo.png", help="where the plot goes")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each version, and one for the whole")
    ask = parser.parse_args()
    began = time.monotonic()
    steps: Steps = []
    try:
        with closing(run_demo(ask.folder.resolve(), ask.versions, ask.seed)) as running:
            for step in running:
                if not ask.json and not steps:
                    print("  ".join(COLUMNS))
                steps.append(step)
                print(json.dumps(step) if ask.json else line(step), flush=True)
    except (FileNotFoundError, vllm_server.StartFailed, HeadraceError) as error:
        raise SystemExit(str(error)) from error
    found = summary(steps, time.monotonic() - began)
    plot(steps, ask.plot)
    text = (
        "{versions} versions in {seconds:.0f} s: reward {first_reward:.2f} → {last_reward:.2f}, "
        "staleness {staleness:.2f}, importance ratio {ratio:.3f}, {capped:.1%} of tokens capped."
    )
    print(json.dumps({**found, "plot": str(ask.plot)}) if ask.json else f"\n{text.format(**found)}\nPlot: {ask.plot}")
    if found["last_reward"] < RISE * found["first_reward"]:
        raise SystemExit("The reward did not double.")


if __name__ == "__main__":
    main()

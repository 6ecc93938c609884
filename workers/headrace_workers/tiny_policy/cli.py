"""``headrace tiny-policy``: serve the tiny policy over HTTP."""

from __future__ import annotations

import json
import socket

import click
import uvicorn

from headrace.errors import HeadraceError, PortInUse
from headrace_workers.tiny_policy.faults import LIES, FaultInjector, FaultSettings
from headrace_workers.tiny_policy.policy import TinyPolicy
from headrace_workers.tiny_policy.server import TinyPolicyServer

BACKLOG = 2048
"""Connections that may wait to be accepted: all workers may connect at once."""


@click.command("tiny-policy", short_help="Serve a small policy that learns on a CPU.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8471, show_default=True, help="Port to listen on; 0: a free one.")
@click.option("--seed", default=0, show_default=True, help="Seed of answers to requests without one.")
@click.option("--model", default="policy", show_default=True, help="Model name that requests must carry.")
@click.option("--slow-s", default=0.0, show_default=True, help="Wait before each answer, in seconds.")
@click.option("--fail-every", default=0, show_default=True, help="Refuse every Nth request; 0: none.")
@click.option("--stall-every", default=0, show_default=True, help="Stall every Nth request; 0: none.")
@click.option("--stall-s", default=5.0, show_default=True, help="Length of a stall, in seconds.")
@click.option("--lie", type=click.Choice(list(LIES)), help="Falsify this in every answer.")
def command(
    host: str,
    port: int,
    seed: int,
    model: str,
    slow_s: float,
    fail_every: int,
    stall_every: int,
    stall_s: float,
    lie: str | None,
) -> None:
    """Serve the tiny policy: a small model that learns on a CPU and speaks vLLM's completions protocol.

    One line of JSON on standard output gives its address once it accepts connections.
    """
    settings = FaultSettings(
        slow_s=slow_s, fail_every=fail_every, stall_every=stall_every, stall_s=stall_s, lie=lie or ""
    )
    try:
        listener = _listen(host, port)
    except HeadraceError as error:
        raise click.ClickException(str(error)) from error
    address, bound = listener.getsockname()[:2]
    click.echo(json.dumps({"address": f"http://{address}:{bound}"}))
    app = TinyPolicyServer(TinyPolicy(seed), FaultInjector(settings), model=model)
    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", ws="none", lifespan="off", access_log=False, log_level="warning"
    )
    uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"The tiny policy cannot listen on {host}:{port}: {error.strerror}.",
            hint="Check --host, or choose another --port.",
        ) from error
    listener.listen(BACKLOG)
    return listener

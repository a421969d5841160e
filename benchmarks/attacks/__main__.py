"""Attack a server in ways that need no token, and say what it costs the server and a well-behaved client beside them.

    python -m benchmarks.attacks [NAME ...]

Each attack meets a server of its own, which asks for tokens unless the attack says otherwise. The attacker has none. The client
beside it has one where it is asked for, and asks at a steady pace, and a new version of a model comes. Exits with 1 where a
request of the client is lost, the new version is not served, a stack trace is logged, the server does not end well, or memory
exceeds the budget by more than 20 %. The client's p99 is printed and not judged, as shared machines are noisy;
"busy_neighbour" is no attack: it shows what sharing the processor alone costs the client.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from benchmarks.attacks import (
    cache_keys,
    fast_models,
    many_connections,
    open_watches,
    pictures,
    pipelines,
    texts,
    unfinished_messages,
    unread_answers,
)
from benchmarks.attacks.measure import Attack, Outcome, compute, measure
from benchmarks.harness.http2_frames import INFER

BUDGET_MB = 256.0
CHECK = b"/grpc.health.v1.Health/Check"
SMALL_BYTES, LARGE_BYTES = 4 * 2**20, 32 * 2**20  # of a message: the most that a method without tensors takes, and a large one
ATTACKS = (
    Attack(name="busy_neighbour", run=compute),
    Attack(
        name="unfinished_messages",
        run=partial(unfinished_messages.run, path=CHECK, message_bytes=SMALL_BYTES),
        budget_mb=BUDGET_MB / 16,
    ),
    Attack(
        name="unfinished_requests",
        run=partial(unfinished_messages.run, path=INFER, message_bytes=LARGE_BYTES),
        asks_for_tokens=False,
        budget_mb=BUDGET_MB,
    ),
    Attack(name="open_watches", run=open_watches.run, budget_mb=BUDGET_MB / 16),
    Attack(name="unread_answers", run=unread_answers.over_grpc, asks_for_tokens=False, budget_mb=BUDGET_MB),
    Attack(name="unread_rest_answers", run=unread_answers.over_rest, asks_for_tokens=False, budget_mb=BUDGET_MB),
    Attack(
        name="unread_large_answers",
        run=unread_answers.large_over_rest,
        save_models=pipelines.save_ensemble,
        asks_for_tokens=False,
        budget_mb=BUDGET_MB,
    ),
    Attack(
        name="cache_keys",
        run=cache_keys.run,
        save_models=cache_keys.save_models,
        asks_for_tokens=False,
        server_options=("--response-cache-mib", str(cache_keys.CACHE_MIB)),
        budget_mb=2 * cache_keys.CACHE_MIB,  # and what one request takes
    ),
    Attack(
        name="between_steps",
        run=pipelines.between_steps,
        save_models=pipelines.save_ensemble,
        asks_for_tokens=False,
        budget_mb=BUDGET_MB,
    ),
    Attack(
        name="cycles",
        run=pipelines.cycles,
        save_models=pipelines.save_cycles,
        asks_for_tokens=False,
        server_options=("--trust-python-models",),
    ),
    Attack(
        name="fast_models",
        run=fast_models.run,
        save_models=fast_models.save_model,
        asks_for_tokens=False,
        server_options=("--trust-python-models",),
        budget_mb=BUDGET_MB,
    ),
    Attack(name="idle_connections", run=many_connections.idle, max_files=1024, budget_mb=64),
    Attack(name="half_open_tls", run=many_connections.half_open, max_files=1024, tls=True, budget_mb=64),
    *(
        Attack(
            name=attack.__name__,
            run=attack,
            save_models=texts.save_text_models,
            bystander=texts.ask_texts,
            asks_for_tokens=False,
            budget_mb=BUDGET_MB,
        )
        for attack in (texts.tokenize_floods, texts.gone_texts, texts.padded_rows)
    ),
    *(
        Attack(
            name=attack.__name__,
            run=attack,
            save_models=pictures.save_picture_model,
            bystander=pictures.ask_pictures,
            asks_for_tokens=False,
            budget_mb=BUDGET_MB,
        )
        for attack in (pictures.many_passes, pictures.inflating_texts, pictures.large_pictures)
    ),
)
ALLOWED = 1.2  # times the budget


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Attacks to run; all where none is named.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Of each attack, and of the quiet before it.")] = 10.0,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second of the client beside it.")] = 200.0,
) -> None:
    """Run the attacks and print what each cost."""
    known = [attack.name for attack in ATTACKS]
    unknown = set(names or ()) - set(known)
    if unknown:
        raise typer.BadParameter(f"no attack is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    good = True
    for attack in ATTACKS:
        if names and attack.name not in names:
            continue
        outcome = measure(attack, seconds, rate)
        good &= is_good(attack, outcome)
        typer.echo(f"{attack.name}: {'held' if is_good(attack, outcome) else 'NOT HELD'} ({outcome.note})")
        typer.echo(f"  {_memory(attack, outcome)}")
        typer.echo(f"  client beside it: {_client(outcome)}")
        typer.echo(
            f"  server: {outcome.log_lines} log lines, {outcome.tracebacks} stack traces, exit code {outcome.exit_code}; "
            f"new version of a model {'served' if outcome.has_reloaded else 'NOT SERVED'}"
        )
    raise typer.Exit(0 if good else 1)


def is_good(attack: Attack, outcome: Outcome) -> bool:
    """Return whether the server held what it promises."""
    grown_mb = outcome.peak_mb - outcome.idle_mb
    within = attack.budget_mb is None or grown_mb <= ALLOWED * attack.budget_mb
    served = outcome.has_reloaded and not outcome.attacked.lost
    return within and served and not outcome.tracebacks and outcome.exit_code == 0


def _memory(attack: Attack, outcome: Outcome) -> str:
    budget = "no budget" if attack.budget_mb is None else f"budget {attack.budget_mb:.0f} MB"
    return f"memory {outcome.idle_mb:.0f} MB, at its peak {outcome.peak_mb:.0f} MB ({budget})"


def _client(outcome: Outcome) -> str:
    quiet, attacked = outcome.quiet, outcome.attacked
    asked = len(attacked.latencies_s) + len(attacked.lost)
    lost = f"{len(attacked.lost)} of {asked} requests lost" + (f", first: {attacked.lost[0]}" if attacked.lost else "")
    return (
        f"p99 {quiet.p99_ms:.2f} ms in quiet, {attacked.p99_ms:.2f} ms attacked ({attacked.p99_ms / quiet.p99_ms:.2f}x); {lost}"
    )


if __name__ == "__main__":
    typer.run(main)

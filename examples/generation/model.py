"""A decoupled Python model around openvino-genai's continuous batching: requests join and leave the batch at every token.

Three kinds of threads: `execute` gives requests to the engine, one thread computes a token of each request at a time, and a
thread for each request sends its text. So a client that reads slowly delays its own text only: the engine finishes the
request, frees its place in the cache, and the rest of the text, at most `max_tokens` of it, waits for the client.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # (the server brings it)

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # (so that OpenVINO cannot report its use to its maker)
import openvino_genai as genai  # noqa: E402  (after the line above)

SCHEDULER_FIELDS = ("cache_size", "num_kv_blocks", "max_num_seqs", "max_num_batched_tokens")
MAX_RESPONSE_TOKENS = 64
CANCELLED_CHECK_S = 1.0  # how often a request that gets no tokens asks whether its client has gone


class Generation:
    """One request in the engine, and its tokens on their way to the thread that sends them."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._tokens: SimpleQueue[list[int] | None] = SimpleQueue()  # None after the last ones
        self.is_unwanted = False  # whether the client has gone
        self.ending = ""  # why the generation ended: "stop", "length", "ignored" (the cache is too small) or "cancel"

    def move_tokens(self) -> bool:
        """Take what the last step computed; returns whether there is more to compute. For the engine's thread only."""
        if self.is_unwanted:
            self._handle.cancel()
        while self._handle.can_read():
            for output in self._handle.read().values():
                self._tokens.put(list(output.generated_ids))
                self.ending = output.finish_reason.name.lower()
        status = self._handle.get_status()
        if status == genai.GenerationStatus.RUNNING:
            return True
        if status != genai.GenerationStatus.FINISHED:
            self.ending = status.name.lower()
        self._tokens.put(None)
        return False

    def tokens(self) -> Iterator[list[int]]:
        """Yield what has come since the last time, as soon as there is something; an empty list each second without tokens."""
        while True:
            found: list[int] = []
            try:
                part = self._tokens.get(timeout=CANCELLED_CHECK_S)
                while part is not None and len(found) < MAX_RESPONSE_TOKENS:
                    found += part
                    part = self._tokens.get_nowait()
            except Empty:
                yield found
                continue
            yield found + (part or [])
            if part is None:
                return


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        entries = json.loads(args["model_config"])["parameters"]
        parameters = {key: entry["string_value"] for key, entry in entries.items()}
        scheduler = genai.SchedulerConfig()
        for name in SCHEDULER_FIELDS:
            if name in parameters:
                setattr(scheduler, name, int(parameters[name]))
        folder = Path(args["model_repository"]) / args["model_version"]
        self._default_max_tokens = int(parameters.get("default_max_tokens", "256"))
        self._engine = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")
        self._places = threading.Semaphore(scheduler.max_num_seqs)
        self._ids = itertools.count()
        self._begun: SimpleQueue[Generation] = SimpleQueue()
        labels = {"model": args["model_name"], "version": args["model_version"]}
        gauge = pb_utils.MetricFamily.GAUGE
        self._families = [
            pb_utils.MetricFamily("generation_requests", "Requests that the engine has", gauge),
            pb_utils.MetricFamily("generation_cache_usage", "Share of the engine's cache in use, in percent", gauge),
            pb_utils.MetricFamily("generation_steps_total", "Steps of the engine", pb_utils.MetricFamily.COUNTER),
        ]
        self._requests, self._cache_usage, self._steps = (family.Metric(labels=labels) for family in self._families)
        threading.Thread(target=self._run_engine, daemon=True).start()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            self._places.acquire()  # until then, the other requests wait in the server's queue
            try:
                text, stream, config = self._read(request)
                generation = Generation(self._engine.add_request(next(self._ids), text, config))
            except (ValueError, RuntimeError) as error:
                self._places.release()
                refusal = pb_utils.TritonError(str(error).strip().split("\n")[-1], pb_utils.TritonError.INVALID_ARG)
                sender.send(pb_utils.InferenceResponse(error=refusal), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            self._begun.put(generation)
            threading.Thread(target=self._answer, args=(generation, sender, stream), daemon=True).start()

    def _read(self, request: Any) -> tuple[str, bool, Any]:
        def given(name: str, default: Any) -> Any:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return default if tensor is None else tensor.as_numpy().item()

        config = self._engine.get_config()  # a copy of what the model's generation_config.json says
        config.max_new_tokens = max(0, given("max_tokens", self._default_max_tokens))
        if not config.max_new_tokens:
            raise ValueError("max_tokens must be at least 1")
        temperature = given("temperature", 0.0)
        if temperature > 0:
            config.do_sample, config.temperature = True, temperature
            config.rng_seed = given("random_seed", 0)
        return given("text_input", b"").decode(), given("stream", default=False), config

    def _run_engine(self) -> None:
        active: list[Generation] = []
        try:
            while True:
                while not active or not self._begun.empty():
                    active.append(self._begun.get())
                self._engine.step()
                running = [generation for generation in active if generation.move_tokens()]
                for _ in range(len(active) - len(running)):
                    self._places.release()
                active = running
                self._steps.increment(1)
                self._requests.set(len(active))
                self._cache_usage.set(self._engine.get_metrics().cache_usage)
        except Exception:  # noqa: BLE001  (of the engine, whose state is unknown then)
            traceback.print_exc()
            os._exit(1)  # the server starts the model's process again, and answers these requests with UNAVAILABLE

    def _answer(self, generation: Generation, sender: Any, stream: bool) -> None:
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        pieces: list[str] = []
        streamer = genai.TextStreamer(self._engine.get_tokenizer(), pieces.append)
        for tokens in generation.tokens():
            if not generation.is_unwanted and sender.is_cancelled():
                generation.is_unwanted = True  # the engine's thread cancels the request before its next token
            if tokens:
                streamer.write(tokens)
            if stream and pieces:
                sender.send(_response("".join(pieces)))  # waits while the client has 1 MiB to read
                pieces.clear()
        streamer.end()
        if generation.ending == "ignored":
            text = "the request needs more tokens than the engine's cache holds; send less, or set a larger cache_size"
            error = pb_utils.TritonError(text, pb_utils.TritonError.UNAVAILABLE)
            sender.send(pb_utils.InferenceResponse(error=error), final)
        else:
            sender.send(_response("".join(pieces), finish_reason=generation.ending), final)


def _response(text: str, **parameters: str) -> Any:
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("text_output", np.array([text.encode()], object))], parameters=parameters
    )

"""Many concurrent audio streams through silero-vad: compares each answer with that for the audio alone, and measures the rate.

    pip download --no-deps -d WHEELS_DIR silero-vad
    python -m benchmarks.sequences WHEELS_DIR --sequences 1000 --steps 20

A server in a process of its own serves the file of the wheel as it is: its state [2, batch, 128] stays in the server, and the
sampling rate is a constant. Each stream sends one piece of 512 samples (and the 64 before it) after the other. ONNX Runtime
gives the expected answers, for each stream alone. Exits with 1 where one differs by more than TOLERANCE: on some processors
the products of a batch are summed in another order than those of a single row.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
import numpy as np
import onnxruntime as ort
import typer

from benchmarks.converters.wheels import packaged_models
from benchmarks.harness.process_watch import look
from benchmarks.harness.server_process import server_process
from halfserve.protos import inference_pb2 as pb

MODEL = "silero_vad/silero_vad.onnx"
TOLERANCE = 1e-5  # acceptable difference of a probability
SAMPLES, CONTEXT, RATE_HZ = 512, 64, 16_000
INFER = "/inference.GRPCInferenceService/ModelInfer"
STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"
CONFIG = """max_batch_size: {batch}
input {{ name: "input" data_type: TYPE_FP32 dims: {width} }}
output {{ name: "output" data_type: TYPE_FP32 dims: 1 }}
sequence_batching {{
  max_sequence_idle_microseconds: 60000000
  oldest {{ max_candidate_sequences: {sequences} }}
  state {{ input_name: "state" output_name: "stateN" data_type: TYPE_FP32 dims: [ 2, 128 ] }}
}}
parameters {{ key: "halfserve.constant_inputs" value {{ string_value: "sr={rate}" }} }}
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of one run."""

    batch: int  # max_batch_size
    answers: int  # number of answers received
    equal: int  # number of answers that equal ONNX Runtime's for the audio alone, bit for bit
    largest_difference: float  # largest difference of an answer from the expected one
    per_second: float  # answers a second, with the client on the same machine
    rows: float  # mean rows of a batch
    cpu_us: float  # processor time of the server per answer, in microseconds
    p50_ms: float  # median latency of a request at the client, in milliseconds
    p99_ms: float  # 99th percentile of that latency, in milliseconds


def main(
    wheels_dir: Annotated[Path, typer.Argument(help="A folder with the wheel of silero-vad.")],
    sequences: Annotated[int, typer.Option(min=1, help="Streams of audio at once.")] = 1000,
    steps: Annotated[int, typer.Option(min=2, help="Pieces of audio in each.")] = 20,
    batches: Annotated[str, typer.Option(help="Values of max_batch_size to compare.")] = "1,64",
    seed: Annotated[int, typer.Option(help="Of the audio.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the streams with each batch size, and compare every answer."""
    try:
        content = next((model.content for model in packaged_models(wheels_dir) if model.name == MODEL), None)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if content is None:
        raise SystemExit(f"no {MODEL} in the wheels of {wheels_dir}; pip download --no-deps -d {wheels_dir} silero-vad")
    audio = pieces_of_audio(sequences, steps, seed)
    expected = alone(content, audio)
    outcomes = [_run(content, audio, expected, int(batch)) for batch in batches.split(",")]
    if as_json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
    else:
        for one in outcomes:
            print(
                f"max_batch_size {one.batch}: {one.per_second:.0f} answers/s in batches of {one.rows:.1f} rows, "
                f"{one.cpu_us:.0f} us of the server's processor time each, p50 {one.p50_ms:.1f} ms, p99 {one.p99_ms:.1f} ms; "
                f"{one.equal} of {one.answers} equal bit for bit, largest difference {one.largest_difference:.1e}"
            )
    if any(one.largest_difference > TOLERANCE or one.answers != sequences * steps for one in outcomes):
        raise SystemExit(1)


def pieces_of_audio(sequences: int, steps: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Intermittent tones in noise, different for each stream: [sequences, steps, CONTEXT + SAMPLES], overlapping by CONTEXT."""
    random = np.random.default_rng(seed)
    times = np.arange(steps * SAMPLES) / RATE_HZ
    pitch, rhythm = random.uniform(80, 400, (sequences, 1)), random.uniform(1, 6, (sequences, 1))
    voice = np.sin(2 * np.pi * pitch * times) * (np.sin(2 * np.pi * rhythm * times) > 0)
    sound = (0.3 * voice + 0.02 * random.standard_normal(voice.shape)).astype(np.float32)
    padded = np.concatenate([np.zeros((sequences, CONTEXT), np.float32), sound], axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + SAMPLES, axis=1)
    return np.ascontiguousarray(windows[:, ::SAMPLES])


def alone(content: bytes, audio: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the model's answers to each stream by itself: [sequences, steps]."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    answers = np.empty(audio.shape[:2], np.float32)
    for stream, pieces in enumerate(audio):
        state = np.zeros((2, 1, 128), np.float32)
        for step, piece in enumerate(pieces):
            outputs: Any = session.run(["output", "stateN"], {"input": piece[None], "state": state, "sr": np.array(RATE_HZ)})
            output, state = outputs
            answers[stream, step] = output[0, 0]
    return answers


def _run(content: bytes, audio: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], batch: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "vad"
        (model / "1").mkdir(parents=True)
        (model / "1" / "model.onnx").write_bytes(content)
        config = CONFIG.format(batch=batch, sequences=len(audio), width=audio.shape[2], rate=RATE_HZ)
        (model / "config.pbtxt").write_text(config)
        with server_process(Path(folder)) as server:
            before_s = look(server.process.pid).cpu_s
            answers, latencies_s, seconds, rows = asyncio.run(_ask(server.address, audio))
            cpu_s = look(server.process.pid).cpu_s - before_s
    difference = np.abs(answers - expected)
    return Outcome(
        batch=batch,
        answers=int(np.isfinite(answers).sum()),
        equal=int((answers == expected).sum()),
        largest_difference=float(np.nanmax(difference)),
        per_second=answers.size / seconds,
        rows=rows,
        cpu_us=cpu_s / answers.size * 1e6,
        p50_ms=float(np.quantile(latencies_s, 0.5)) * 1e3,
        p99_ms=float(np.quantile(latencies_s, 0.99)) * 1e3,
    )


async def _ask(address: str, audio: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], list[float], float, float]:
    """Answers to all concurrent streams, seconds of each request and in total, and mean rows of a batch."""
    answers, latencies_s = np.full(audio.shape[:2], np.nan, np.float32), []
    async with grpc.aio.insecure_channel(address) as channel:
        infer = channel.unary_unary(INFER, response_deserializer=pb.ModelInferResponse.FromString)

        async def stream(number: int) -> None:
            for step, piece in enumerate(audio[number]):
                began = time.monotonic()
                response = await infer(_request(number, piece, starts=step == 0, ends=step + 1 == len(audio[number])))
                latencies_s.append(time.monotonic() - began)
                answers[number, step] = np.frombuffer(response.raw_output_contents[0], "<f4")[0]

        statistics = channel.unary_unary(STATISTICS, response_deserializer=pb.ModelStatisticsResponse.FromString)
        asked = pb.ModelStatisticsRequest(name="vad").SerializeToString()
        began = time.monotonic()
        await asyncio.gather(*map(stream, range(len(audio))))
        seconds = time.monotonic() - began
        (model,) = (await statistics(asked)).model_stats
    return answers, latencies_s, seconds, model.inference_count / model.execution_count


def _request(number: int, piece: np.ndarray[Any, Any], *, starts: bool, ends: bool) -> bytes:
    message = pb.ModelInferRequest(model_name="vad", raw_input_contents=[piece.tobytes()])
    message.inputs.add(name="input", datatype="FP32", shape=[1, len(piece)])
    message.parameters["sequence_id"].int64_param = number + 1
    message.parameters["sequence_start"].bool_param = starts
    message.parameters["sequence_end"].bool_param = ends
    return bytes(message.SerializeToString())


if __name__ == "__main__":
    typer.run(main)

"""What the peer benches share: timing in PyTorch, and the JSON that `kiln bench --compare` reads.

A peer bench registers rows `(op, pass, shape, dtype, name, setup, bytes, flops)`, where `setup()`
returns a function that runs one call, and this module times them all in alternation: warm, bursts
of some milliseconds between two events, the median of the bursts with its spread.
"""

import argparse
import datetime
import json
import statistics
import sys
import time

import torch

# Memory that the inputs rotate through: many times the L2 cache.
ROTATED = 1e9
BURST_MS = 30.0
PAUSE = 0.05


def sets(bytes_of_a_call):
    """How many sets of inputs a bench rotates through."""
    return max(1, min(16, int(-(-ROTATED // max(1, bytes_of_a_call)))))


def repeat(call, calls):
    for turn in range(calls):
        call(turn)


def record(call, calls):
    """The calls as one CUDA graph: what the device needs for them, without the host's time between
    one launch and the next. What cannot be recorded is launched one by one."""
    graph = torch.cuda.CUDAGraph()
    try:
        call(0)
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            repeat(call, calls)
        return graph.replay
    except RuntimeError as error:
        print(f"not recorded: {error}")
        return lambda: repeat(call, calls)


def burst(run):
    """Milliseconds on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def time_together(calls, rounds):
    """Times several calls in alternation; returns microseconds (median, 20 %, 80 %) of each."""
    for call in calls:
        for turn in range(3):
            call(turn)
    few = [burst(lambda: repeat(call, 3)) / 3 for call in calls]
    lengths = [max(1, min(500, int(BURST_MS / max(1e-4, ms)))) for ms in few]
    recorded = [record(call, length) for call, length in zip(calls, lengths)]
    times = [[] for _ in calls]
    for _ in range(rounds):
        for run, length, out in zip(recorded, lengths, times):
            # Bursts without pauses heat the board up to its limit and time that.
            time.sleep(PAUSE)
            out.append(burst(run) / length * 1e3)
    quantiles = []
    for out in times:
        out.sort()
        at = lambda share: out[round((len(out) - 1) * share)]
        quantiles.append((statistics.median(out), at(0.2), at(0.8)))
    return quantiles


def main(ops, shapes=("small", "train", "large")):
    """Runs a peer bench: of each operator, `rows(dtype, shapes)` yields (pass, shape, bytes, flops,
    {name: call})."""
    parser = argparse.ArgumentParser(description=f"Times {', '.join(ops)} in PyTorch and others.")
    parser.add_argument("--json", help="file for `kiln bench --compare`")
    parser.add_argument("--shapes", choices=shapes, default="train")
    parser.add_argument("--pass", dest="only", choices=["forward", "backward"], help="this pass alone")
    parser.add_argument("--rounds", type=int, default=12, help="bursts of each call")
    parser.add_argument("--dtype", choices=["f32", "bf16", "f16"], default="bf16")
    args = parser.parse_args()
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[args.dtype]
    run = {
        "device": "cuda:0",
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": " ".join(["python3"] + sys.argv) + f" (torch {torch.__version__})",
        "rows": [],
    }
    # The default stream cannot be recorded, and a backward runs on the stream of its forward.
    torch.cuda.set_stream(torch.cuda.Stream())
    measured = ((op, *row) for op, rows in ops.items() for row in rows(dtype, args.shapes))
    for op, which, shape, nbytes, flops, calls in measured:
        if args.only not in (None, which):
            continue
        for name, (us, low, high) in zip(calls, time_together(list(calls.values()), args.rounds)):
            run["rows"].append(
                dict(op=op, **{"pass": which}, shape=shape, dtype=args.dtype, implementation=name,
                     us=us, us_low=low, us_high=high, bytes=nbytes, flops=flops)
            )
            rates = f"{nbytes / us / 1e3:.0f} GB/s, {flops / us / 1e6:.0f} TFLOP/s"
            print(f"{op} {which} {shape} {name}: {us:.1f} us, {rates}", flush=True)
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(run, file, indent=1)

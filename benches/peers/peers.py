"""What the peer benches share: the cases of Kiln's registry, their data, timing in PyTorch, and the JSON that
`kiln bench --compare` reads.

A peer bench says which implementations of an operator there are, `peers.main({"rms_norm": of})` where
`of(case)` returns {name: Peer}. This module times them all as Kiln times its own: in alternation, warm, on inputs
that rotate through more memory than a cache holds, in bursts of some milliseconds that are recorded as a CUDA
graph, by the device's clock.

Shapes, bytes and operations come from `cases.jsonl`, which `kiln bench --cases` prints.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import pathlib
import signal
import statistics
import subprocess
import shlex
import sys
import tempfile
import time
import typing

import torch
import torch._dynamo
import torch._functorch.config

# As bench/workload.rs has them: the memory that inputs rotate through, the most sets of inputs, the milliseconds
# of a burst and its most calls.
ROTATED = 1e9
SETS = 4096
BURST_MS = 30.0
CALLS = 500
# Milliseconds that going through all sets of inputs may take. A call slow enough for more gains nothing from a cache.
LONGEST_MS = 3000.0
PAUSE = 0.05
SEED = 7

PASSES = ("forward", "backward", "both")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

# Graphs are walked again and again, and what their backward reads must still be there.
if hasattr(torch._functorch.config, "donated_buffer"):
    torch._functorch.config.donated_buffer = False


@dataclasses.dataclass
class Peer:
    """An implementation: a function of the inputs that returns the output or all of them, differentiable."""

    run: typing.Callable
    # The passes that it has.
    passes: tuple = PASSES
    # Passes that are not `run` and autograd's: functions of the inputs and the cotangents.
    own: dict = dataclasses.field(default_factory=dict)
    # Inputs and cotangents as it wants them, made before anything is timed.
    prepare: typing.Callable = lambda *inputs: inputs
    prepare_cotangents: typing.Callable = lambda *cotangents: cotangents
    # It writes over its inputs: they are made good before each burst, which goes through them once.
    writes: bool = False
    # Whether to try to record it: where that fails inside a library, the stream may be of no more use.
    records: bool = True
    # The most calls that are recorded, and sets of inputs, where each call is thousands of launches: what these few read
    # a cache may hold, which takes nothing from what the launches cost.
    calls: typing.Optional[int] = None
    # Instead of `run`, for a library that launches on a stream of its own, which cannot be recorded. Of all sets of
    # inputs it makes a function that goes through them once and returns when that is done: in as few launches as it
    # can, as the host's time for them counts.
    through: typing.Optional[typing.Callable] = None


def torches(function, suffix=""):
    """A function of PyTorch by itself and compiled, by name. CUDA graphs are left to this bench, which records
    everybody's calls."""
    return {
        f"torch{suffix}": function,
        f"torch.compile{suffix}": torch.compile(function, dynamic=False),
        f"torch.compile max-autotune{suffix}": torch.compile(
            function, dynamic=False, mode="max-autotune-no-cudagraphs"
        ),
    }


@dataclasses.dataclass
class Case:
    """A line of cases.jsonl."""

    op: str
    scale: str
    shape: str
    file: str
    tensors: list
    work: list
    # The element type, as Kiln names it.
    dtype: str

    def data(self, folder, count):
        """Sets of inputs, and the cotangents, on the device: from the file of the case, or drawn with its
        means and deviations. As Kiln does, each set from a file begins another share of its numbers further on."""
        if folder is not None:
            from safetensors.torch import load_file

            path = pathlib.Path(folder) / f"{self.file}-{self.dtype}.safetensors"
            if not path.exists():
                sys.exit(f"error: {path} is not there: kiln bench {self.op} --data {folder} writes it")
            loaded = load_file(path, device="cuda")

            def one(tensor, turn):
                flat = loaded[tensor["name"]].flatten()
                return flat.roll(-(turn * flat.numel() // count)).view(tensor["shape"])

        else:
            torch.manual_seed(SEED)

            def one(tensor, turn):
                shape, holds = tensor["shape"], tensor["holds"]
                own = torch.float32 if tensor["f32"] else DTYPES[self.dtype]
                if holds == "one":
                    return torch.ones(shape, device="cuda", dtype=own)
                if "classes" in holds:
                    return torch.randint(holds["classes"], shape, device="cuda")
                if "mostly_last" in holds:
                    count = holds["mostly_last"]
                    drawn = torch.randint(2 * count - 1, shape, device="cuda")
                    return drawn.clamp_(max=count - 1)
                if holds == "shares":
                    return torch.rand(shape, device="cuda", dtype=own)
                if "ends" in holds:
                    return torch.linspace(0, holds["ends"], shape[0], device="cuda").long()
                normal = holds["normal"]
                made = torch.randn(shape, device="cuda", dtype=own)
                return made.mul_(normal["deviation"]).add_(normal["mean"])

        inputs = [t for t in self.tensors if not t["name"].startswith("grad.")]
        cotangents = [t for t in self.tensors if t["name"].startswith("grad.")]
        sets = [tuple(one(t, turn) for t in inputs) for turn in range(count)]
        return sets, [one(t, 0) for t in cotangents]


def cases(op, scale, dtype):
    with open(pathlib.Path(__file__).with_name("cases.jsonl"), encoding="utf-8") as lines:
        found = [Case(**json.loads(line), dtype=dtype) for line in lines]
    return [case for case in found if (case.op, case.scale) == (op, scale)]


def named(shape, known):
    """Of cases of an operator the one of this name, or else those whose first shape it is."""
    exact = [case for case in known if case.shape == shape]
    return exact or [case for case in known if case.shape.replace(",", " ").split()[0] == shape]


@dataclasses.dataclass
class Call:
    """What is timed: `run(turn)`, and what makes the inputs good again if it writes over them."""

    run: typing.Callable
    restore: typing.Optional[typing.Callable] = None


def make(peer, which, sets, cotangents):
    """The pass of an implementation as a call."""
    inputs = [peer.prepare(*one) for one in sets]
    restore = None
    if peer.writes:
        kept = inputs
        inputs = [tuple(t.clone() for t in one) for one in inputs]

        def restore():
            for one, good in zip(inputs, kept):
                for t, value in zip(one, good):
                    t.data.copy_(value)

    # An input that is not there is empty.
    leaf = lambda t: t.detach().requires_grad_(t.numel() > 0) if t.is_floating_point() else t
    leaves = [tuple(map(leaf, one)) for one in inputs]
    wanted = [[t for t in one if t.requires_grad] for one in leaves]
    # The cotangent of a loss is 1, which is what autograd takes by itself.
    given = [None if t.numel() == 1 else t for t in peer.prepare_cotangents(*cotangents)]
    count = len(sets)

    def outputs(one):
        ys = peer.run(*one)
        # Outputs without a gradient come last.
        return ys[: len(given)] if isinstance(ys, tuple) else (ys,)

    if which in peer.own:
        run = lambda turn: peer.own[which](leaves[turn % count], given)
    elif which == "forward":

        def run(turn):
            with torch.no_grad():
                return peer.run(*inputs[turn % count])

    elif which == "both":

        def run(turn):
            at = turn % count
            return torch.autograd.grad(outputs(leaves[at]), wanted[at], given)

    else:
        # The graphs are made once and walked again and again: only the backward is timed.
        graphs = [outputs(one) for one in leaves]

        def run(turn):
            at = turn % count
            return torch.autograd.grad(graphs[at], wanted[at], given, retain_graph=True)

    return Call(run, restore)


def repeat(call, calls):
    for turn in range(calls):
        call.run(turn)


def one_by_one(call, calls):
    return lambda: repeat(call, calls), False


def record(call, calls, pool):
    """The calls as one CUDA graph: what the device needs for them, without the host's time between one launch
    and the next. What cannot be recorded is launched one by one. Returns what runs them, and which of the two."""
    graph = torch.cuda.CUDAGraph()
    try:
        call.run(0)
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            repeat(call, calls)
        return graph.replay, True
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        print(f"not recorded: {error}")
        return one_by_one(call, calls)


def burst(run, before=None):
    """Milliseconds on the device. It is still busy with `before` when `run` is launched: a burst of a few calls has
    no time of the host in it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if before:
        before()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def peak_mib(call):
    """Memory that one call takes on top of what is there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call.run(0)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def time_together(peers, which, sets, cotangents, rounds):
    """Times a pass of several implementations in alternation; returns the measured part of a row for each that
    finds the memory, by name."""
    rows, runs = {}, []
    # The graphs run one at a time and nobody reads what they leave: they share their memory.
    pool = torch.cuda.graph_pool_handle()
    for name, peer in peers.items():
        try:
            if peer.through:
                run = peer.through(sets)
                run()
                times = math.ceil(BURST_MS / max(1e-3, burst(run)))
                # Its memory is not PyTorch's to count.
                rows[name] = {"recorded": False, "peak_mib": None}
                runs.append((run, len(sets), times, Call(run), []))
                continue
            own = sets[: peer.calls]
            call = make(peer, which, own, cotangents)
            repeat(call, 3)
            peak = peak_mib(call)
            few = burst(lambda: repeat(call, 3)) / 3
            # A burst that went through a part of the sets would find that part in the cache.
            length = max(len(own), min(peer.calls or CALLS, int(BURST_MS / max(1e-4, few))))
            length = max(1, min(length, int(LONGEST_MS / max(1e-4, few))))
            length = len(own) if call.restore else length
            # What is recorded reads the inputs and graphs of `call`, which have to stay.
            run, recorded = record(call, length, pool) if peer.records else one_by_one(call, length)
            # Recorded calls are repeated to fill a burst, unless they write over their inputs.
            times = 1 if call.restore or not recorded else math.ceil(BURST_MS / max(1e-3, burst(run)))
        except torch.OutOfMemoryError:
            print(f"{name}: not enough memory")
            continue
        except torch.AcceleratorError:
            raise
        except (RuntimeError, AssertionError) as error:
            # It does not take the case.
            print(f"{name}: {error}")
            continue
        rows[name] = {"recorded": recorded, "peak_mib": peak}
        runs.append((run, length, times, call, []))
    for _ in range(rounds):
        for run, length, times, call, found in runs:
            # Bursts without pauses heat the board up to its limit and time that.
            time.sleep(PAUSE)
            ms = burst(lambda: [run() for _ in range(times)], call.restore)
            found.append(ms / (length * times) * 1e3)
    for row, (*_, found) in zip(rows.values(), runs):
        found.sort()
        at = lambda share: found[int((len(found) - 1) * share + 0.5)]
        row.update(us=statistics.median(found), us_low=at(0.2), us_high=at(0.8))
    return rows


class Watch:
    """Samples of the board while it is timed, as bench/board.rs takes them."""

    FIXED = "driver_version,power.limit,clocks.max.sm"
    SAMPLED = "clocks.sm,clocks.mem,power.draw,temperature.gpu"

    def __init__(self):
        self.log = tempfile.TemporaryFile("w+")
        self.board = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        self.sampler = None
        try:
            query = self.query(self.SAMPLED) + ["-lms", "200"]
            self.sampler = subprocess.Popen(query, stdout=self.log, stderr=subprocess.DEVNULL)
        except OSError as error:
            print(f"no nvidia-smi: {error}")

    def query(self, fields):
        options = [f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        return ["nvidia-smi", "-i", self.board, *options]

    def end(self):
        if self.sampler is None:
            return None
        ask = lambda fields: subprocess.run(self.query(fields), capture_output=True, text=True).stdout
        fixed, samples = ask(self.FIXED), ask(self.SAMPLED)
        self.sampler.kill()
        self.sampler.wait()
        self.log.seek(0)
        samples += self.log.read()
        try:
            driver, power_limit, sm_limit = (field.strip() for field in fixed.split(","))
            fields = [line.split(",") for line in samples.splitlines()]
            lines = [[float(value) for value in line] for line in fields if len(line) == 4]

            def of(field):
                values = sorted(line[field] for line in lines)
                middle = values[(len(values) - 1) // 2]
                return {"low": values[0], "middle": middle, "high": values[-1]}

            return {
                "driver": driver,
                "power_limit_w": float(power_limit),
                "sm_limit_mhz": float(sm_limit),
                "sm_mhz": of(0),
                "memory_mhz": of(1),
                "power_w": of(2),
                "temperature_c": of(3),
            }
        except (ValueError, IndexError) as error:
            print(f"nvidia-smi does not say it all: {error}")
            return None


def versions():
    found = {"torch": torch.__version__}
    others = ("transformer-engine", "tile-kernels", "tilelang", "flash-attn-4", "jax", "nvidia-cusparse")
    for name in ("triton", "liger-kernel", *others):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def measure(ops, args):
    """The rows of a run."""
    known = [cases(op, args.shapes, args.dtype) for op in ops]
    asked = {shape: [case for of in known for case in named(shape.replace("x", "×"), of)] for shape in args.case or ()}
    for shape, found in asked.items():
        if not found:
            timed = "; ".join(case.shape for of in known for case in of)
            sys.exit(f"error: --case {shape}: what is timed is {timed}")
    for case in [case for of in known for case in of]:
        if asked and not any(case in found for found in asked.values()):
            continue
        for work in case.work:
            which, nbytes, flops = work["pass"], work["bytes"][args.dtype], work["flops"]
            if args.only not in (None, which):
                continue
            torch._dynamo.reset()
            found = {
                name: peer
                for name, peer in ops[case.op](case).items()
                if which in peer.passes and name in (args.implementations or [name])
            }
            if not found:
                continue
            count = max(1, min(SETS, math.ceil(ROTATED / max(1.0, nbytes))))
            sets, cotangents = case.data(args.data, count)
            measured = time_together(found, which, sets, cotangents, args.rounds)
            for name, row in measured.items():
                rates = f"{nbytes / row['us'] / 1e3:.0f} GB/s, {flops / row['us'] / 1e6:.0f} TFLOP/s"
                print(f"{case.op} {which} {case.shape} {name}: {row['us']:.1f} us, {rates}", flush=True)
                of = {"op": case.op, "pass": which, "shape": case.shape, "dtype": args.dtype}
                yield of | {"implementation": name, "bytes": nbytes, "flops": flops} | row
            del sets, cotangents
            torch.cuda.empty_cache()


def main(ops, dtype="bf16"):
    """Runs a peer bench: of each operator, `of(case)` returns {name: Peer}. `dtype` is what it is timed in if
    nothing is said."""
    # A run that is stopped keeps what was timed: this ends it as an error does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description=f"Times {', '.join(ops)} in PyTorch and others.")
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"these alone, of {', '.join(ops)}")
    parser.add_argument("--json", help="file for `kiln bench --compare`")
    parser.add_argument("--shapes", choices=("small", "train", "large", "thin", "lengths"), default="train")
    parser.add_argument("--case", action="append", metavar="SHAPE", help="the case that is this, else those whose first shape it is")
    parser.add_argument("--pass", dest="only", choices=PASSES, help="this pass alone")
    parser.add_argument("--rounds", type=int, default=12, help="bursts of each call")
    parser.add_argument("--dtype", choices=DTYPES, default=dtype)
    parser.add_argument("--data", metavar="FOLDER", help="read the files of `kiln bench --data FOLDER`")
    parser.add_argument(
        "--implementations", nargs="+", metavar="NAME", help="these alone: max-autotune is slow"
    )
    args = parser.parse_args()
    for op in args.ops:
        if op not in ops:
            parser.error(f"{op}: expected one of {', '.join(ops)}")
    ops = {op: ops[op] for op in args.ops or ops}
    # As Kiln's own f32 products are: exact.
    torch.backends.cuda.matmul.allow_tf32 = False
    run = {
        "device": "cuda:0",
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(["python3"] + sys.argv),
        "versions": versions(),
    }
    # The default stream cannot be recorded, and a backward runs on the stream of its forward.
    torch.cuda.set_stream(torch.cuda.Stream())
    watch = Watch()
    rows = []
    try:
        rows.extend(measure(ops, args))
    finally:
        # An implementation that breaks the device ends the run; what was timed before is kept.
        run["board"] = watch.end()
        run["rows"] = rows
        if args.json and rows:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(run, file, indent=1, ensure_ascii=False)
                file.write("\n")

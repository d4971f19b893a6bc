#!/usr/bin/env python3
"""The plug-in for PyTorch against PyTorch alone, in one process on one GPU.

    pip install --no-deps dist/stowage-*.whl # or: PYTHONPATH=pytorch STOWAGE_LIBRARY=build/libstowage.so
    python3 pytorch/bench/torch_plugin.py
    python3 pytorch/bench/torch_plugin.py --part moe --json
    python3 pytorch/bench/torch_plugin.py --device cpu --quick      # does it run? times mean nothing

Parts (if one fails, it is reported and the others go on):
  overhead   the plug-in with nothing moved, and Python's time a saved tensor
  moe        six mixture-of-experts layers, 7168 x 2048, 16 experts, 4,080 tokens to 8 of
             them (32,640 rows): eager, save_on_cpu with pinned memory, and the plug-in, the
             last two with the same tensors
  budget     the same layers with saved tensors limited to 85, 70 and 50 % of what they
             save; then under budgets of 95, 90 and 85 % of the peak of PyTorch alone
  graph      the same layers in a CUDA graph: buffers of the exact size, oversized twice,
             and oversized with rt.stash
  dense      eight decoder layers of width 4096 on 4096 tokens: as moe
  curve      both models trained for 20 steps, with and without the plug-in: the losses

The first layers move: as many as a link of --link GB/s can copy during 0.8 of the forward
pass, whose time is measured first; --move sets their number. Kinds take turns; a time is the
median of its steps by CUDA events. The peak is what PyTorch was asked for (blocks are a little
larger) plus what the runtime holds on the device. Gradients stay allocated between steps, as
with buckets, so that the peak is at the end of the forward pass, where activations are. Losses
and gradients of all kinds are compared. save_on_cpu moves parameters, too; the plug-in does
not.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
import traceback

sys.dont_write_bytecode = True
PARTS = ["overhead", "moe", "budget", "graph", "dense", "curve"]


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--part", action="append", choices=PARTS, help="only this part (may be given again)")
    p.add_argument("--steps", type=int, default=15, help="measured steps of each kind (default 15)")
    p.add_argument("--move", type=int, help="layers that move (default: what fits the link)")
    p.add_argument("--link", type=float, default=55.0, help="GB/s to the host, for that choice (default 55)")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--quick", action="store_true", help="small sizes, few steps")
    p.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    a = p.parse_args()
    if a.quick:
        a.steps = min(a.steps, 3)
    return a


ARGS = parse()
try:
    import torch

    import stowage
except ImportError as e:
    sys.exit(f"torch_plugin: {e}; install PyTorch and `pip install dist/stowage-*.whl`, or set PYTHONPATH=pytorch")
if ARGS.device == "cuda" and not torch.cuda.is_available():
    sys.exit("torch_plugin: PyTorch finds no CUDA GPU; --device cpu --quick tries it without one")

from torch_models import Decoder, Mixture, Routing

CUDA = ARGS.device == "cuda"
DTYPE = torch.bfloat16 if CUDA else torch.float32
MIB = 1 << 20


def sizes(quick, full):
    return quick if ARGS.quick else full


def say(text):
    if not ARGS.json:
        print(text, flush=True)


def sync():
    if CUDA:
        torch.cuda.synchronize()


def own(rt):
    """Returns the device memory that the runtime itself holds."""
    return rt.stats()["memory"]["kind"][0]["current"] if rt is not None else 0


def peak(rt):
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] + own(rt)


class Kind:
    """One way to run a step: run() runs a forward and a backward pass and returns the loss."""

    def __init__(self, name, run, rt=None):
        self.name, self.run, self.rt = name, run, rt
        self.times, self.peak, self.loss = [], 0, None

    def step(self, measured):
        sync()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.loss = self.run()
            end.record()
            sync()
            took = begin.elapsed_time(end)
            self.peak = peak(self.rt)
        else:
            begin = time.perf_counter()
            self.loss = self.run()
            took = (time.perf_counter() - begin) * 1e3
        if measured:
            self.times.append(took)

    def result(self):
        return {"name": self.name, "ms": round(statistics.median(self.times), 3), "best_ms": round(min(self.times), 3), "peak_mib": round(self.peak / MIB, 1), "loss": float(self.loss)}


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def clear(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        else:
            p.grad.zero_()


def measure(model, kinds, warm=6, exact=contextlib.nullcontext):
    """Measures kinds in turns. Under exact, in which the first kind has the same gradients
    twice, all kinds must have the gradients of the first."""
    want, equal = None, {}
    with exact():
        for k in [kinds[0]] + kinds:
            for _ in range(3 if k.rt is not None else 1):  # recorded, planned, planned again
                clear(model)
                k.run()
            got = gradients(model)
            equal[k.name] = want is None or all(torch.equal(a, b) for a, b in zip(want, got))
            want = want or got
            del got
    want = None
    for turn in range(warm + ARGS.steps):
        for k in kinds:
            clear(model)
            k.step(turn >= warm)
    results = [k.result() for k in kinds]
    first = results[0]
    for r in results:
        r.update(ratio=round(r["ms"] / first["ms"], 4), saved_mib=round(first["peak_mib"] - r["peak_mib"], 1), same_gradients=equal[r["name"]], same_loss=r["loss"] == first["loss"])
        say(f"  {r['name']:34} {r['ms']:9.2f} ms  {r['ratio']:6.3f}x  peak {r['peak_mib']:9.1f} MiB  saved {r['saved_mib']:8.1f}  gradients {'equal' if r['same_gradients'] else 'DIFFER'}")
    return results


def forward_ms(run):
    times = []
    for _ in range(5):
        sync()
        begin = time.perf_counter()
        out = run()
        sync()
        times.append((time.perf_counter() - begin) * 1e3)
        del out
    return min(times)


def compare(model, forward, layers, exact=contextlib.nullcontext):
    """Compares eager, save_on_cpu and the plug-in; the last two move the first layers."""
    rt = stowage.Runtime(policy={"moved": "offload"}, device=ARGS.device, least=0)  # all that save_on_cpu moves
    group = lambda moved: lambda i: rt.group("moved" if i < moved else "kept")

    def step(inside):
        loss = forward(inside)
        loss.backward()
        return loss.detach()

    def plug(moved):
        with rt.step(f"{moved}"):
            return step(group(moved))

    def on_cpu(moved):
        pinned = lambda: torch.autograd.graph.save_on_cpu(pin_memory=CUDA)
        return step(lambda i: pinned() if i < moved else contextlib.nullcontext())

    try:
        clear(model)
        step(None)
        ms = forward_ms(lambda: forward(None))
        # One layer moved tells what a layer saves; bytes of further ones are alike.
        for _ in range(2):
            clear(model)
            plug(1)
        layer = moved_bytes(rt) or group_bytes(rt, "moved")
        fits = int(0.8 * ms * 1e-3 * ARGS.link * 1e9 / max(layer, 1))
        moved = ARGS.move if ARGS.move is not None else max(1, min(fits, layers - 1))
        say(f"  forward pass {ms:.2f} ms; a layer saves {layer / MIB:.1f} MiB: {fits} fit a link of {ARGS.link:.0f} GB/s; {moved} of {layers} layers move")
        kinds = [Kind("eager", lambda: step(None)), Kind(f"save_on_cpu, {moved} layers", lambda: on_cpu(moved)), Kind(f"stowage, {moved} layers", lambda: plug(moved), rt)]
        results = measure(model, kinds, exact=exact)
        plugged = results[-1]
        bytes = moved_bytes(rt)
        plugged.update(moved_mib=round(bytes / MIB, 1), link_gb_s=round(2 * bytes / plugged["ms"] / 1e6, 1))
        say(f"  moved {bytes / MIB:.0f} MiB out and back: {plugged['link_gb_s']} GB/s of both directions together over the step")
        plugged["notes"] = (rt.stats().get("decision") or {}).get("notes") or []
        for note in plugged["notes"]:
            say(f"  note: {note}")
        return {"forward_ms": ms, "layers": layers, "moved_layers": moved, "layer_bytes": layer, "kinds": results}
    finally:
        rt.close()


def moved_bytes(rt):
    return rt.stats()["summary"]["counts"]["OutBytes"]


def group_bytes(rt, name):
    return sum(g["bytes"] for g in rt.stats()["summary"]["groups"] if g["name"] == name)


def mixture(room=1):
    """Returns the model, its input, and a routing whose buffers have room times the rows."""
    layers, hidden, width, experts, tokens, k = sizes((6, 64, 32, 4, 64, 2), (6, 7168, 2048, 16, 4080, 8))
    torch.manual_seed(0)
    model = Mixture(layers, hidden, width, experts, DTYPE, ARGS.device)
    x = torch.randn(tokens, hidden, dtype=DTYPE, device=ARGS.device)
    return model, x, Routing(tokens, k, experts, room * tokens * k, ARGS.device)


def square_loss(x):
    return x.float().square().mean()


def moe():
    model, x, routing = mixture()
    return compare(model, lambda inside: square_loss(model(x, routing, inside=inside)), len(model.layers))


def budget():
    """The mixture with a limit on saved tensors, then under budgets for the whole process. The
    runtime chooses what to offload."""
    out = {}
    model, x, routing = mixture()

    def step():
        loss = square_loss(model(x, routing))
        loss.backward()
        return loss.detach()

    saved, eager = None, 0
    for share in (None, 0.85, 0.7, 0.5):
        with stowage.Runtime(saved_limit="1TiB" if share is None else int(share * saved), device=ARGS.device) as rt:

            def plug():
                with rt.step():
                    return step()

            if share is None:
                clear(model)
                plug()
                saved = rt.stats()["summary"]["device_peak"]
                say(f"  a step saves {saved / MIB:.0f} MiB")
                continue
            try:
                results = measure(model, [Kind("eager", step), Kind(f"saved limit of {share:.0%}", plug, rt)])
            except stowage.Error as e:  # below what a step needs in any case
                out[f"{share}"] = str(e)
                say(f"  saved limit of {share:.0%}: {e}")
                continue
            results[-1].update(counted_mib=round(rt.stats()["summary"]["device_peak"] / MIB, 1), moved_mib=round(moved_bytes(rt) / MIB, 1))
            out[f"{share}"] = results
            eager = results[0]["peak_mib"] * MIB
    for share in (0.95, 0.9, 0.85) if CUDA else ():
        with stowage.Runtime(budget=int(share * eager), device=ARGS.device) as rt:

            def whole():
                with rt.step():
                    return step()

            name = f"budget of {share:.0%} of the peak"
            try:
                results = measure(model, [Kind("eager", step), Kind(name, whole, rt)])
            except stowage.Error as e:
                out[name] = str(e)
                say(f"  {name}: {e}")
                continue
            results[-1].update(budget_mib=round(share * eager / MIB, 1), moved_mib=round(moved_bytes(rt) / MIB, 1))
            out[name] = results
    return {"saved_bytes": saved, **out}


def decoder():
    layers, hidden, heads, n = sizes((4, 64, 4, 64), (8, 4096, 32, 4096))
    torch.manual_seed(0)
    model = Decoder(layers, hidden, heads, DTYPE, ARGS.device)
    return model, torch.randn(1, n, hidden, dtype=DTYPE, device=ARGS.device)


def in_order():
    """Makes attention add in one order; fast kernels for its backward pass do not."""
    if not CUDA:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


def dense():
    model, x = decoder()
    return compare(model, lambda inside: square_loss(model(x, inside=inside)), len(model.layers), in_order)


def losses(make, settings, steps=20):
    """Returns the losses of a model that is trained to return zero."""
    model, x, *routing = make()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    with stowage.Runtime(device=ARGS.device, **settings) if settings else contextlib.nullcontext() as rt:
        out = []
        for _ in range(steps):
            inside = None if rt is None else lambda layer: rt.group("first" if layer == 0 else "later")
            with in_order(), rt.step() if rt is not None else contextlib.nullcontext():
                loss = square_loss(model(x, *routing, inside=inside))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(loss.item())
        return out, 0 if rt is None else moved_bytes(rt)


def curve():
    out = {}
    for name, make in (("mixture", mixture), ("dense", decoder)):
        want, _ = losses(make, None)
        for kind, settings in (("first layer offloaded", {"policy": {"first": "offload"}}), ("saved limit", {"saved_limit": sizes("1MiB", "3GiB")})):
            got, moved = losses(make, settings)
            out[f"{name}, {kind}"] = {"same": got == want, "first": got[0], "last": got[-1], "moved_mib": round(moved / MIB, 1)}
            say(f"  {name}, {kind}: {len(got)} losses from {got[0]:.5f} to {got[-1]:.5f}, {'equal' if got == want else 'DIFFER'}; {moved / MIB:.0f} MiB moved a step")
    return out


def captured(model, x, routing, rt):
    """Captures a step. Returns how to replay it, and PyTorch's peak during the capture.
    Gradients exist before and are cleared inside, as with buckets."""
    live = (lambda t, name: rt.stash(t, rows=routing.count, name=name)) if rt is not None else (lambda t, _: t)
    clear(model)
    grads = [p.grad for p in model.parameters()]

    def fn():
        torch._foreach_zero_(grads)
        loss = square_loss(model(x, routing, live))
        loss.backward()
        return loss.detach()

    if not CUDA:
        return (lambda: rt.run(fn)) if rt is not None else fn, 0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # with rows the first step counts them
            fn() if rt is None else rt.run(fn, key="graph")
    torch.cuda.current_stream().wait_stream(side)
    sync()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with rt.step("graph") if rt is not None else contextlib.nullcontext():
            loss = fn()

    def replay():
        graph.replay()
        if rt is not None:
            rt.check()
        return loss

    return replay, peak(rt)


def graph():
    with stowage.Runtime(policy=dict.fromkeys(("expert_fc1", "moe_act", "expert_fc2"), "stash"), device=ARGS.device) as rt:
        return graphs(rt)


def graphs(rt):
    """Captures all graphs first, each with a model of its own, and replays them in turns."""
    kinds, models, inputs = [], [], []
    for name, room, plugged in (("exact", 1, None), ("oversized 2x", 2, None), ("oversized 2x, stash", 2, rt)):
        before = torch.cuda.memory_stats()["requested_bytes.all.current"] if CUDA else 0
        model, x, routing = mixture(room)
        run, most = captured(model, x, routing, plugged)
        kinds.append(Kind(name, run, plugged))
        kinds[-1].captured = most - before if CUDA else 0
        models.append(model)
        inputs.append((x, routing))  # graphs hold addresses, not tensors
    for turn in range(3 + ARGS.steps):
        for kind, model in zip(kinds, models):
            if not CUDA:
                clear(model)
            kind.step(turn >= 3)
    results = []
    for kind, model in zip(kinds, models):
        same = all(torch.equal(p.grad, q.grad) for p, q in zip(models[0].parameters(), model.parameters()))
        results.append({**kind.result(), "peak_mib": round(kind.captured / MIB, 1), "same_gradients": same})
    exact, over, plug = results
    plug.update(room_mib=round(rt.stats()["room"] / MIB, 1))
    for r in results:
        r.update(time_to_oversized=round(r["ms"] / over["ms"], 4), memory_to_exact=round(r["peak_mib"] / exact["peak_mib"], 4) if CUDA else None)
        say(f"  {r['name']:34} {r['ms']:9.2f} ms  {r['time_to_oversized']:6.3f} of oversized  peak {r['peak_mib']:9.1f} MiB  {r['memory_to_exact'] or '-'} of exact  gradients {'equal' if r['same_gradients'] else 'DIFFER'}")
    return {"kinds": results}


def overhead():
    """Nothing moves: a policy keeps all groups, or a budget holds everything."""
    out = {}
    model, x, routing = mixture()

    def step(inside):
        loss = square_loss(model(x, routing, inside=inside))
        loss.backward()
        return loss.detach()

    for name, settings in (("kept by policy", {"policy": {"none": "keep"}}), ("the budget holds all", {"budget": "1TiB"})):
        with stowage.Runtime(device=ARGS.device, **settings) as rt:

            def plug():
                with rt.step():
                    return step(lambda i: rt.group("experts"))

            out[name] = measure(model, [Kind("eager", lambda: step(None)), Kind(name, plug, rt)])
    del model, x
    tensors = 400

    def small(group):
        y = torch.ones(64, device=ARGS.device, requires_grad=True)
        for _ in range(tensors // 4):
            with group():
                for _ in range(4):
                    y = torch.tanh(y)
        y.sum().backward()

    for name, least in (("too small to move", "1MiB"), ("moved", 0)):
        with stowage.Runtime(policy={"a": "offload"}, device=ARGS.device, least=least) as rt:

            def with_it():
                with rt.step():
                    small(lambda: rt.group("a"))

            def host(run):
                sync()
                begin = time.perf_counter()
                run()
                sync()
                return time.perf_counter() - begin

            for _ in range(3):
                host(with_it), host(lambda: small(contextlib.nullcontext))
            pairs = [(host(with_it), host(lambda: small(contextlib.nullcontext))) for _ in range(10)]
            out[name + ", us a tensor"] = us = round((min(a for a, _ in pairs) - min(b for _, b in pairs)) / tensors * 1e6, 2)
            say(f"  {name}: {us} µs a saved tensor, the library's part included (groups of 4 tensors of 256 bytes)")
    return out


def main():
    out = {"torch": torch.__version__, "stowage": stowage.__version__, "device": torch.cuda.get_device_name() if CUDA else "cpu", "parts": {}, "failed": []}
    say(f"PyTorch {out['torch']} on {out['device']}, stowage {out['stowage']}")
    for name in ARGS.part or PARTS:
        say(name)
        try:
            out["parts"][name] = globals()[name]()
        except Exception as e:
            traceback.print_exc()
            out["failed"].append({"part": name, "why": f"{type(e).__name__}: {e}"})
        if CUDA:
            torch.cuda.empty_cache()
    if ARGS.json:
        print(json.dumps(out, indent=2))
    sys.exit(1 if out["failed"] else 0)


if __name__ == "__main__":
    main()

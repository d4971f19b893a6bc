"""The tables of pytorch/bench/torch_rivals.py: a row for each kind, a cell for each target, and what
the cells sum up to."""

import statistics

MIB = 1 << 20
NOT_SLOWER, FASTER, NOTHING = 1.005, 0.97, 1.01  # ratios: to rivals, and to eager if nothing is moved


def paired(ours, theirs):
    """Returns the median ratio of times within a turn, or None if there are none."""
    return statistics.median(a / b for a, b in zip(ours, theirs)) if ours and theirs else None


def tells(ours, theirs, limits):
    """Reports whether the ratio of times in turns is on one side of each limit, by twice the standard error of a
    median. The spread is that of the half in the middle, because a disturbed step may take any time."""
    ratios = [a / b for a, b in zip(ours, theirs)]
    quarter, middle, three = statistics.quantiles(ratios, n=4)
    error = 2 * 1.25 * (three - quarter) / 1.35 / len(ratios) ** 0.5
    return all(abs(middle - limit) > error for limit in limits)


def row(kind, trial):
    """Returns what a kind took, as plain data."""
    ms = kind.median()
    peak = kind.peak / MIB if kind.peak and kind.error is None else None
    return {
        "kind": kind.name, "family": kind.family, "compiled": kind.compiled, "ours": kind.ours, "exact": kind.exact, "error": kind.error, "unexpected": kind.unexpected,
        "ms": ms if kind.error is None else None, "in_turns": bool(kind.times), "ratio": (kind.against or ms / (trial.eager.median() or trial.eager.probe)) if ms and kind.error is None else None,
        "peak_mib": peak, "saved_mib": None if peak is None else trial.eager.peak / MIB - peak,
        "target_mib": None if kind.target is None else kind.target / MIB, "kept": None if kind.target is None or kind.error else kind.peak <= kind.target,
        "like": kind.like, "differs": kind.differs, "gradients": gradients(kind, trial.repeats),
        "tag": kind.tag, "report": kind.report, "recorded_mib": kind.recorded / MIB if kind.ours else None, "steps": kind.history if kind.ours else None,
    }  # fmt: skip


def gradients(kind, repeats):
    if kind.error is not None:
        return "-"
    if not repeats.get(kind.like, True):
        return f"{kind.like} differs from itself"
    if kind.differs is None:
        return "-"
    return "equal" if kind.differs == 0 else f"differ by {kind.differs:.0e}"


def best(rivals):
    """Returns the fastest rival, and the fastest that is not compiled."""
    done = sorted((k for k in rivals if k.error is None), key=lambda k: k.median())
    return list(dict.fromkeys(done[:1] + [k for k in done if not k.compiled][:1]))


def note(cell, kind, rivals, took):
    """Adds a kind of ours to its cell, with the rivals that took turns with it."""
    turns = lambda k: [round(t, 2) for t in k.times]
    beside = [{"kind": k.name, "ms": took[k.name], "turns_ms": turns(k), "compiled": k.compiled, "peak_mib": k.peak / MIB} for k in rivals if k.name in took]
    fits = kind.error is None and kind.peak <= kind.target
    cell["ours"].append({"kind": kind.name, "ms": took.get(kind.name), "turns_ms": turns(kind), "compiled": kind.compiled, "peak_mib": kind.peak / MIB, "fits": fits, "error": kind.error, "rivals": beside})


def decide(cell):
    """Adds the verdicts: of all kinds, and of those that are not compiled."""
    cell["all"] = verdict(cell["ours"], lambda k: True)
    cell["plain"] = verdict([k for k in cell["ours"] if not k["compiled"]], lambda k: not k["compiled"])
    return cell


def against(ours, counts=lambda rival: True):
    """Returns the fastest rival of a kind of ours, and the ratio to it."""
    rival = min((r for r in ours["rivals"] if counts(r)), key=lambda r: r["ms"], default=None)
    return rival, rival and (paired(ours["turns_ms"], rival["turns_ms"]) or ours["ms"] / rival["ms"])


def verdict(ours, counts):
    """Compares the best of ours with the fastest rival in the same turns. A ratio of None means
    that one of the two is missing."""
    found = []
    for k in ours:
        if k["fits"] and k["ms"] is not None:
            rival, ratio = against(k, counts)
            found.append({"stowage": k["kind"], "ms": k["ms"], "rival": rival and rival["kind"], "rival_ms": rival and rival["ms"], "ratio": ratio})
    if found:
        return min(found, key=lambda v: v["ratio"] or 0)
    why = next((k["error"] or "over the target" for k in ours), "not measured")
    return {"stowage": None, "ms": None, "rival": None, "rival_ms": None, "ratio": None, "why": why}


def outcome(v):
    """Returns a verdict in words."""
    if v["stowage"] is None:
        return f"no result of ours: {v['why']}"
    if v["rival"] is None:
        return f"{v['stowage']} {v['ms']:.1f} ms; no rival fits"
    return f"{v['stowage']} {v['ms']:.1f} ms, {v['ratio']:.3f} of {v['rival']} ({v['rival_ms']:.1f} ms)"


def cell_line(cell):
    text = f"  {cell['share']:g} % ({cell['target_mib']:,.1f} MiB): {outcome(cell['all'])}"
    if cell["plain"] != cell["all"]:
        text += f"\n    without torch.compile: {outcome(cell['plain'])}"
    return text


def effort(kind):
    """Returns how long a kind of ours took to settle its plan, and how many turns it had."""
    recorded = [h["ms"] / 1e3 for h in kind.history if h["stage"] == "recorded" and "ms" in h]
    tried = len(kind.history) - len(recorded) - sum(h["stage"] == "settled" for h in kind.history)
    return f"recorded {len(recorded)} steps in {sum(recorded):.1f} s, tried plans in {tried}; settled after {kind.seconds[0]:.1f} s; {len(kind.times)} turns in {kind.seconds[1]:.1f} s"


def number(x, form="{:,.0f}"):
    return "-" if x is None else form.format(x)


def table(result):
    head = ["kind", "step ms", "of eager", "peak MiB", "saved MiB", "budget", "gradients"]
    lines = []
    for r in sorted(result["rows"], key=lambda r: (r["ours"], r["compiled"], r["family"], -(r["peak_mib"] or 0))):
        if r["error"] is not None:
            lines.append([r["kind"], r["error"]])
            continue
        about = "" if r["in_turns"] else "~"  # a single step, not in turns
        kept = "-" if r["kept"] is None else "kept" if r["kept"] else f"over {r['target_mib']:,.0f}"
        lines.append([r["kind"], about + number(r["ms"], "{:,.2f}"), number(r["ratio"], "{:.3f}"), number(r["peak_mib"], "{:,.1f}"), number(r["saved_mib"], "{:,.1f}"), kept, r["gradients"]])
    widths = [max(len(line[i]) for line in [head, *lines] if len(line) == len(head)) for i in range(len(head))]
    widths[0] = max(len(line[0]) for line in [head, *lines])
    out = [f"{result['model']}: {result['seconds']:.0f} s" + ("; peaks are counted, times mean nothing" if result["counted"] else "") + "; ~ is a single step, not in turns"]
    for line in [head, *lines]:
        if len(line) == 2:
            out.append(f"  {line[0].ljust(widths[0])}  {line[1]}")
        else:
            cells = [line[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(line[1:6], widths[1:6])] + [line[6]]
            out.append("  " + "  ".join(cells))
    return "\n".join(out)


def failures(result):
    """Returns what must not happen: an error that is not about memory, and gradients of ours
    that differ."""
    out = [f"{result['model']}: {r['kind']}: {r['error']}" for r in result["rows"] if r["unexpected"]]
    return out + [f"{result['model']}: {r['kind']}: its gradients differ from those of {r['like']}" for r in result["rows"] if r["ours"] and r["exact"] and r["differs"] and r["error"] is None and result["repeats"].get(r["like"], True)]


def tally(verdicts):
    not_slower = sum(v["stowage"] is not None and (v["ratio"] or 0) <= NOT_SLOWER for v in verdicts)
    faster = sum(v["stowage"] is not None and (v["ratio"] or 0) <= FASTER for v in verdicts)
    alone = sum(v["stowage"] is not None and v["rival"] is None for v in verdicts)
    return f"cells: {len(verdicts)}, not slower: {not_slower}, 3 % faster: {faster}" + (f" ({alone} where no rival fits)" if alone else "")


def overview(models):
    """Returns a line for each model: at each target the ratio to the fastest rival, whether the budget was
    kept in all steps after the recorded ones, and whether gradients are equal; then what a runtime costs that moves nothing."""
    lines = []
    for m in models:
        rows = {r["kind"]: r for r in m["rows"]}
        words = []
        for cell in m["cells"]:
            ours = cell["ours"][0] if cell["ours"] else None
            r = rows.get(ours["kind"]) if ours else None
            if r is None or r["error"] is not None:
                words.append(f"{cell['share']:g} % " + ("not measured" if r is None else "too small" if "too small" in r["error"] else "failed"))
                continue
            ratio = number(against(ours)[1], "{:.3f}") if ours["rivals"] and ours["ms"] else f"{number(r['ratio'], '{:.3f}')} of eager, no rival"
            words.append(f"{cell['share']:g} % {ratio}, {'kept' if r['kept'] else 'EXCEEDED'}, {r['gradients'] if r['gradients'] != 'eager differs from itself' else 'varying'}")
        nothing = next((r["ratio"] for r in m["rows"] if r["kind"] == "stowage, nothing moved"), None)
        lines.append(f"{m['model']}: " + "; ".join(words) + (f"; nothing moved {nothing:.3f}" if nothing else ""))
    return "\n".join(lines)


def summary(models):
    cells = [c for m in models for c in m["cells"]]
    text = tally([c["all"] for c in cells])
    if [c["all"] for c in cells] != [c["plain"] for c in cells]:
        text += "\nwithout torch.compile: " + tally([c["plain"] for c in cells])
    return text

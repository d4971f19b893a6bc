"""The report: statistics as a table."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence


def human(n: float) -> str:
    """Returns a size with its unit, such as "1.5 GiB"."""
    if n < 1024:
        return f"{n:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        n /= 1024
        if n < 1024:
            break
    return f"{n:.1f} {unit}"


def plan_lines(p: Dict[str, Any]) -> List[str]:
    """Returns one line for each choice of a plan."""
    lines = [] if p["choices"] else ["  everything is kept"]
    for choice, units in sorted(p["choices"].items()):
        lines.append(f"  {choice}: {len(units)} block{'' if len(units) == 1 else 's'} ({units[0]}{' to ' + units[-1] if len(units) > 1 else ''})")
    if p["recomputed_ns"]:
        lines.append(f"  recomputing takes about {p['recomputed_ns'] / 1e6:.1f} ms a step")
    if p["offloaded"]:
        lines.append(f"  {human(p['offloaded'])} are offloaded in a step")
    return lines


def _plans(plans: Dict[str, Any]) -> List[str]:
    """Returns one line for each key and each choice of its plan."""
    lines: List[str] = []
    for key, p in plans.items():
        name = "step" if p["steps"] == 1 else "steps"
        if key:
            name += f" {key!r}"
        stage = "" if p["stage"] == "settled" else f" ({'recorded' if p['stage'] == 'recorded' else 'still trying plans'})"
        if not p["steps"]:
            continue
        lines.append(f"{p['steps']} {name} under a plan{stage}: {human(p['saved'])} saved, {human(p['kept'])} of it kept on the device")
        lines += plan_lines(p)
    return lines


def _memory(stats: Dict[str, Any]) -> List[str]:
    lines = []
    budget = stats.get("budget")
    if budget:
        lines.append(f"budget {human(budget['size'])}: the peak of all is {human(budget['peak'])}")
        if budget["outside"] > budget["size"]:
            lines.append(f"note: {human(budget['outside'])} were held between steps, more than the budget; the runtime cannot lower that")
    device, host = stats["memory"]["kind"][:2]
    lines.append(f"the runtime itself holds {human(device['current'])} on the device, {human(host['current'])} on the host")
    return lines


def table(stats: Dict[str, Any], notes: Sequence[str] = ()) -> str:
    """Returns one line for each group of the last step, then the memory."""
    summary = stats["summary"]
    if not stats["steps"]:
        return "no step yet"
    if any(p["steps"] for p in stats.get("plans", {}).values()):
        return "\n".join([*_plans(stats["plans"]), *_memory(stats), *(f"note: {n}" for n in notes)])
    rows: List[List[str]] = [["group", "times", "saved", "moved", "choice"]]
    for g in summary["groups"]:
        choices = ", ".join(f"{n} {choice}" for choice, n in sorted(g["units"].items()))
        rows.append([g["name"], str(g["groups"]), human(g["bytes"]), human(g["moved"]), choices])
    for r in stats.get("rows") or []:
        choices = ", ".join(f"{n} {choice}" for choice, n in sorted(r["units"].items()))
        rows.append([r["name"], str(r["storages"]), human(r["bytes"]), "live rows", choices])
    widths = [max(len(r[i]) for r in rows) for i in range(5)]
    n = stats.get("overflows", 0)
    again = f", reruns included ({n} overflow{'' if n == 1 else 's'})" if n else ""
    lines = [f"{stats['steps']} step{'' if stats['steps'] == 1 else 's'}{again}; the last one:"]
    for r in rows:
        cells = [r[0].ljust(widths[0])] + [r[i].rjust(widths[i]) for i in (1, 2, 3)] + [r[4]]
        lines.append("  ".join(cells).rstrip())
    limit = f" (limit {human(stats['saved_limit'])})" if stats.get("saved_limit") else ""
    lines.append(f"saved tensors at their peak: {human(summary['device_peak'])} on the device{limit}, {human(summary['host_peak'])} on the host")
    budget = stats.get("budget")
    if budget:
        lines.append(f"budget {human(budget['size'])}: everything else takes {human(budget['other'])} at its peak; the peak of all is {human(budget['peak'])}")
    if stats.get("room"):
        lines.append(f"berths for live rows take {human(stats['room'])} on the device")
    device, host = stats["memory"]["kind"][:2]
    lines.append(f"the runtime itself holds {human(device['current'])} on the device, {human(host['current'])} on the host")
    if budget and budget["outside"] > budget["size"]:
        lines.append(f"note: {human(budget['outside'])} were held between steps, more than the budget; the runtime cannot lower that")
    for note in ((stats.get("decision") or {}).get("notes") or []) + list(notes):
        lines.append(f"note: {note}")
    return "\n".join(lines)

"""The picture of pytorch/bench/torch_rivals.py: time against memory, a panel for each model, as SVG
that can be read without colours."""

import math
from html import escape

WIDTH, HEIGHT, COLUMNS = 460, 340, 2  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 44, 48

# How a family is drawn: the shape of its marks, dark or light, and the dashes of its line.
FAMILIES = {
    "eager": ("eager", "circle", "#000", ""),
    "checkpoint": ("checkpoint of k blocks", "square", "#777", "5 3"),
    "selective": ("selective checkpoint", "diamond", "#999", "2 3"),
    "compile": ("torch.compile, memory budget", "triangle", "#777", "8 3 2 3"),
    "compiled checkpoint": ("compiled, checkpoint of k blocks", "cross", "#999", "1 3"),
    "stowage": ("Stowage", "disc", "#000", ""),
    "stowage compiled": ("Stowage on compiled blocks", "solid triangle", "#000", "6 2"),
    "stowage checkpointed": ("Stowage and checkpoints", "solid square", "#000", "2 2"),
}


def family(row):
    if not row["ours"]:
        return row["family"]
    return "stowage compiled" if row["compiled"] else "stowage checkpointed" if "checkpointed" in row["kind"] else "stowage"


def mark(shape, x, y, shade):
    """Returns a mark around a point: outlined for rivals, filled for Stowage."""
    fill = shade if shape in ("disc", "solid triangle", "solid square") else "#fff"
    style = f'fill="{fill}" stroke="{shade}" stroke-width="1.5"'
    if shape in ("circle", "disc"):
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {style}/>'
    if shape == "cross":
        return f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" {style}/>'
    points = {
        "square": [(-4, -4), (4, -4), (4, 4), (-4, 4)],
        "diamond": [(0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)],
        "triangle": [(0, -5), (5, 4), (-5, 4)],
    }[shape.replace("solid ", "")]
    return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in points)}" {style}/>'


def ticks(low, high, most=6):
    """Returns round numbers between two bounds."""
    sizes = [factor * 10.0**power for power in range(-9, 10) for factor in (1, 2, 5)]
    step = next(size for size in sizes if (high - low) / size <= most)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def label(text, x, y, anchor="middle", size=11, more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{more}>{escape(text)}</text>'


class Axes:
    """Maps memory and time to a panel."""

    def __init__(self, left, top, rows):
        xs, ys = [r["peak_mib"] / 1024 for r in rows], [r["ratio"] for r in rows]
        pad = lambda low, high: (low - 0.06 * (high - low or 1), high + 0.06 * (high - low or 1))
        (self.x0, self.x1), (self.y0, self.y1) = pad(min(xs), max(xs)), pad(min(ys), max(ys))
        self.left, self.right, self.top, self.bottom = left + LEFT, left + WIDTH - RIGHT, top + TOP, top + HEIGHT - BOTTOM

    def x(self, gib):
        return self.left + (gib - self.x0) / (self.x1 - self.x0) * (self.right - self.left)

    def y(self, ratio):
        return self.bottom - (ratio - self.y0) / (self.y1 - self.y0) * (self.bottom - self.top)

    def draw(self):
        out = [f'<rect x="{self.left}" y="{self.top}" width="{self.right - self.left}" height="{self.bottom - self.top}" fill="none" stroke="#000"/>']
        for v in ticks(self.x0, self.x1):
            out += [f'<path d="M{self.x(v):.1f} {self.bottom}v4" stroke="#000"/>', label(f"{v:.4g}", self.x(v), self.bottom + 17)]
        for v in ticks(self.y0, self.y1):
            out += [f'<path d="M{self.left} {self.y(v):.1f}H{self.right}" stroke="#ddd"/>', label(f"{v:.4g}", self.left - 6, self.y(v) + 4, "end")]
        middle = (self.top + self.bottom) / 2
        out.append(label("peak memory, GiB", (self.left + self.right) / 2, self.bottom + 36))
        turn = f' transform="rotate(-90 {self.left - 42} {middle})"'
        out.append(label("time of a step, of eager", self.left - 42, middle, more=turn))
        return out


def panel(result, left, top):
    # What takes far longer, such as save_on_cpu, would press the rest together.
    rows = [r for r in result["rows"] if r["ratio"] is not None and r["peak_mib"] is not None and r["family"] in FAMILIES]
    rows = [r for r in rows if r["kind"] != "stowage, nothing moved"]
    out = [label(result["model"], left + LEFT, top + 18, "start", 14, ' font-weight="bold"'), label(result["what"], left + LEFT, top + 34, "start", 10)]
    if not rows:
        return out + [label("no kind gave a result", left + WIDTH / 2, top + HEIGHT / 2)]
    axes = Axes(left, top, rows)
    out += axes.draw()
    for name, (_, shape, shade, dashes) in FAMILIES.items():
        points = sorted((r["peak_mib"] / 1024, r["ratio"], r["tag"]) for r in rows if family(r) == name)
        at = [(axes.x(a), axes.y(b)) for a, b, _ in points]
        if len(at) > 1:
            thick = 2 if name.startswith("stowage") else 1
            out.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}" fill="none" stroke="{shade}" stroke-width="{thick}" stroke-dasharray="{dashes}"/>')
        out += [mark(shape, x, y, shade) for x, y in at]
        below = 14 if name.startswith("stowage") else -7
        out += [label(tag, x, y + below, size=8) for (x, y), (_, _, tag) in zip(at, points) if tag]
    return out


def picture(results):
    """Returns the SVG of all models, with one legend."""
    models = results["models"]
    used = {family(r) for m in models for r in m["rows"] if r["ratio"] is not None}
    shown = [v for name, v in FAMILIES.items() if name in used]
    columns = min(COLUMNS, max(len(models), 1))
    lines = -(-len(models) // columns)
    legend = 40 + 20 * -(-len(shown) // 2)
    width, height = max(columns * WIDTH, WIDTH), lines * HEIGHT + legend
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<title>Time of a training step against its peak memory</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, m in enumerate(models):
        out += panel(m, i % columns * WIDTH, i // columns * HEIGHT)
    for i, (text, shape, shade, dashes) in enumerate(shown):
        x, y = LEFT + i % 2 * WIDTH / 2 * columns, lines * HEIGHT + 10 + i // 2 * 20
        out.append(f'<path d="M{x:.0f} {y}h28" stroke="{shade}" stroke-width="{2 if text.startswith("Stowage") else 1}" stroke-dasharray="{dashes}"/>')
        out += [mark(shape, x + 14, y, shade), label(text, x + 38, y + 4, "start")]
    out.append(label("Lower and further left is better. Beside marks: blocks, memory budget, share of what is saved.", LEFT, height - 22, "start", 10))
    out.append(label(f"{results['device']}, PyTorch {results['torch']}, stowage {results['stowage']}", LEFT, height - 8, "start", 10))
    return "\n".join([*out, "</svg>", ""])

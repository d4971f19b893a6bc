// Owns the comparison: a row for each run with bars in its cells, and one scale for each
// column.

const compareColumns = () => {
  const { runs } = state.report;
  const peaks = runs.map(devicePeak), hosts = runs.map(hostPeak), times = runs.map(stepTime), speeds = runs.map(speedOf), losses = runs.map(lossOf), sums = runs.map(checksum);
  const budgets = runs.map(budgetOf), topPeak = most(peaks.map((f, i) => f ? Math.max(f.value, f.predicted || 0, budgets[i] && budgets[i] < f.value * 3 ? budgets[i] : 0) : 0)) * 1.02;
  const topHost = most(hosts.map((f) => f ? f.value : 0)), topTime = most(times.map((f) => f ? f.value : 0));
  const cell = (text, below, picture) => h("div", { class: "cell" }, h("span", { class: "figure" }, text), below ? h("small", {}, below) : null, picture);
  const relative = (list, i) => i > 0 && !runs[i].apart && list[0] && list[i] && list[0].value ? "× " + (list[i].value / list[0].value).toFixed(2) : null;
  const columns = [
    { name: "run", get: (r, i) => h("button", { type: "button", class: "pick", "aria-pressed": String(i === state.run), title: "Show this run", onclick: () => choose(i) }, (r.name || "run " + (i + 1)).split("+").map((part, k) => k ? ["+", h("wbr"), part] : part)) },
    { name: "device peak", class: "wide", get: (r, i) => peaks[i] ? cell(bytes(peaks[i].value), [relative(peaks, i), said(peaks[i]) ? "predicted " + bytes(peaks[i].predicted) : null].filter(Boolean).join(" · "),
      bar({ value: peaks[i].value, top: topPeak, mark: peaks[i].predicted, limit: budgets[i], variable: "k-launch" })) : "–" },
    { name: "host peak", class: "wide", get: (r, i) => hosts[i] ? cell(bytes(hosts[i].value), relative(hosts, i), bar({ value: hosts[i].value, top: topHost, variable: "g2" })) : "–" },
    { name: "step time", class: "wide", get: (r, i) => times[i] ? cell(millis(times[i].value), i > 0 && timeRatio(r, runs[0]) ? "× " + timeRatio(r, runs[0]).toFixed(2) : null, bar({ value: times[i].value, top: topTime, variable: "g1" })) : "–" },
    { name: "tokens/s", n: true, get: (r, i) => speeds[i] ? count(Math.round(speeds[i].value)) : "–" },
    { name: "loss", n: true, get: (r, i) => losses[i] ? lossText(losses[i].value) : "–" },
    { name: "parameters", get: (r, i) => sums[i] ? h("span", { class: r.apart ? "soft" : sums[i] === sums[0] ? "good" : "bad", title: sums[i] }, r.apart ? "" : sums[i] === sums[0] ? "✓ " : "✗ ", h("code", {}, sums[i].slice(0, 8))) : "–" },
  ];
  return columns.filter((c, j) => j === 0 || [peaks, hosts, times, speeds, losses, sums][j - 1].some(Boolean));
};

// The scatter shows memory against time. Its axes need not begin at zero, because a dot
// has no length. A label takes the first free place.
const scatter = () => {
  const W = 340, H = 230, L = 58, B = 32, T = 18, R = 14;
  const points = state.report.runs.map((r, i) => ({ i, name: String(r.name).slice(0, 22), x: stepTime(r), y: devicePeak(r) })).filter((p) => p.x && p.y);
  if (points.length < 2) return null;
  const span = (values) => { const lo = Math.min(...values), hi = Math.max(...values), pad = (hi - lo) * 0.18 || hi * 0.1 || 1; return [Math.max(lo - pad, 0), hi + pad]; };
  const [x0, x1] = span(points.map((p) => p.x.value)), [y0, y1] = span(points.map((p) => p.y.value));
  for (const p of points) { p.px = L + (W - L - R) * (p.x.value - x0) / (x1 - x0); p.py = H - B - (H - B - T) * (p.y.value - y0) / (y1 - y0); }
  const taken = points.map((p) => [p.px - 6, p.py - 6, p.px + 6, p.py + 6]);
  const marks = points.map((p) => {
    const w = p.name.length * (p.i === state.run ? 7.4 : 6.6), places = [[9, 4, "start"], [-9, 4, "end"], [0, -10, "middle"], [0, 17, "middle"], [9, -9, "start"], [-9, -9, "end"], [9, 17, "start"], [-9, 17, "end"]];
    const boxOf = ([dx, dy, anchor]) => { const a = p.px + dx - (anchor === "end" ? w : anchor === "middle" ? w / 2 : 0), b = p.py + dy - 10; return [a, b, a + w, b + 12]; };
    const cost = (q) => (q[0] >= L - 8 && q[2] <= W - 4 && q[1] >= 0 && q[3] <= H - B + 4 ? 0 : 10) + taken.filter((o) => o[0] < q[2] && q[0] < o[2] && o[1] < q[3] && q[1] < o[3]).length;
    const at = places[leastOf(places, (q) => cost(boxOf(q)))];
    taken.push(boxOf(at));
    return s("g", { class: p.i === state.run ? "dot on" : "dot", onclick: () => choose(p.i) }, s("circle", { cx: p.px, cy: p.py, r: 5 }), s("text", { x: p.px + at[0], y: p.py + at[1], "text-anchor": at[2] }, p.name));
  });
  const ticks = (lo, hi, step) => { const out = []; for (let v = Math.ceil(lo / step) * step; v <= hi; v += step) out.push(v); return out; };
  const byteStep = 2 ** Math.round(Math.log2((y1 - y0) / 4));
  return h("figure", { class: "scatter" }, s("svg", { viewBox: "0 0 " + W + " " + H, role: "img", "aria-label": "Device peak against step time, a dot for each run. The table beside it has the numbers." },
    ticks(y0, y1, byteStep).map((v) => { const y = H - B - (H - B - T) * (v - y0) / (y1 - y0); return [s("line", { x1: L, x2: W - R, y1: y, y2: y, class: "grid" }), s("text", { x: L - 6, y: y + 4, "text-anchor": "end", class: "tick" }, bytes(v).replace(/\.0+ /, " "))]; }),
    ticks(x0, x1, steps125(x1 - x0, 4)).map((v) => s("text", { x: L + (W - L - R) * (v - x0) / (x1 - x0), y: H - B + 14, "text-anchor": "middle", class: "tick" }, millis(v).replace(/\.0+ /, " "))),
    s("text", { x: W - R, y: H - 3, "text-anchor": "end", class: "tick" }, "step time →"), s("text", { x: 2, y: T - 7, class: "tick" }, "↑ device peak"), marks),
  h("figcaption", { class: "soft" }, "Closer to the lower left is better: less memory, less time."));
};

section({
  id: "compare", name: "Compare", title: "Runs side by side",
  about: "The tick on a bar is the forecast, and the dashed line is the budget. Select a row to see that run.",
  there: () => state.report.runs.length > 1,
  draw(x) {
    const rows = state.report.runs, had = document.activeElement && x.body.contains(document.activeElement);
    const t = table(compareColumns(), rows, { class: "compare cards-when-narrow" });
    [...t.tBodies[0].rows].forEach((tr, i) => { if (i === state.run) tr.classList.add("on"); });
    x.body.replaceChildren(h("div", { class: "split" }, h("div", {}, t, x.all = x.all || allFigures()), scatter()));
    if (had) { const el = x.body.querySelector(".pick[aria-pressed=true]"); if (el) el.focus(); }
    x.alternative.draw();
  },
});
const allFigures = () => {
  const me = state.sections.find((x) => x.id === "compare");
  me.alternative = alternative("all figures of all runs", () => {
    const { runs } = state.report, names = [...new Map(runs.flatMap((r) => r.figures.map((f) => [f.name, f.label || f.name])))];
    return table([{ name: "figure", get: ([, label]) => label }, ...runs.map((r) => ({
      name: r.name, n: true, get: ([name]) => { const f = r.figures.find((y) => y.name === name); return f ? f.unit === "text" ? h("span", { class: "clip", title: f.text }, f.text) : figure(f) : "–"; },
    }))], names);
  });
  return me.alternative.element;
};

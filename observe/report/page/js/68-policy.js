// Owns decisions and forecasts: the policy with its reasons, counts of events, and
// forecasts beside measurements.

const CHOICES = ["keep", "stash", "offload", "recompute"];
const choiceBar = (units) => {
  const entries = Object.entries(units || {}).filter(([, n]) => n > 0).sort(([a], [b]) => (CHOICES.indexOf(a) + 9) % 9 - (CHOICES.indexOf(b) + 9) % 9);
  const all = sum(entries.map(([, n]) => n)) || 1;
  let at = 0;
  return h("div", { class: "units" }, s("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", class: "meter", "aria-hidden": "true" }, entries.map(([name, n]) => {
    const from = at;
    at += 100 * n / all;
    return s("rect", { x: from, y: 1, width: Math.max(at - from - 0.8, 0.5), height: 8, class: "c-" + (CHOICES.includes(name) ? name : "other") });
  })), h("small", {}, entries.map(([name, n]) => name + " " + n).join(" · ") || "–"));
};

section({
  id: "policy", name: "Policy", title: "Choice for each group, and why",
  about: "The choice for each unit (a module of a layer), the bytes that it saves in a step, and how many of them move.",
  there: () => !!state.data && (state.data.policy.length > 0 || state.data.counts.length > 0),
  draw(x) {
    const { policy, counts } = state.data;
    const seen = CHOICES.filter((c) => policy.some((p) => p.units && p.units[c]));
    x.body.replaceChildren(...(counts.length ? [h("dl", { class: "counts", "aria-label": "Counts of rank " + theRank().rank }, counts.map((f) => h("div", {}, h("dt", {}, f.label || f.name), h("dd", {}, figure(f)))))] : []),
      ...(policy.length ? [h("ul", { class: "legend" }, seen.map((c) => h("li", {}, h("i", { class: "swatch c-" + c, "aria-hidden": "true" }), c))), table([
        { name: "group", get: (p) => [swatch(paint.variable(p.group, true)), p.group] }, { name: "choice", class: "wide", get: (p) => choiceBar(p.units) },
        { name: "saved", n: true, get: (p) => bytes(p.saved) }, { name: "moved", n: true, get: (p) => p.moved ? bytes(p.moved) : "–" }, { name: "reason", class: "reason", get: (p) => p.reason || "–" },
      ], policy, { class: "policy cards-when-narrow" })] : []));
  },
});

// A difference grows from the middle: to the left if less than predicted was measured, to
// the right if more.
const differenceBar = (d, top) => {
  const w = clamp(50 * Math.abs(d) / (top || 1), 0.8, 50);
  return s("svg", { class: "meter", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { x: 0, y: 4.5, width: 100, height: 1, class: "rail" }),
    s("rect", { x: d < 0 ? 50 - w : 50, y: 1, width: w, height: 8, class: "value" }), s("line", { x1: 50, x2: 50, y1: 0, y2: 10, class: "mark" }));
};
const forecasts = () => state.report.runs.flatMap((run) => run.figures.filter((f) => said(f) && f.unit !== "text" && (f.value || f.predicted)).map((f) => ({ run, f, d: f.predicted ? (f.value - f.predicted) / f.predicted : 0 })));
section({
  id: "predicted", name: "Predicted", title: "Predicted beside measured",
  about: "In training, the forecast comes from the first steps, which are recorded before the policy is final. The measurement comes from the steps after them.",
  there: () => forecasts().length > 0,
  draw(x) {
    const rows = forecasts(), top = Math.max(most(rows.map((r) => Math.abs(r.d))), 0.01);
    x.body.replaceChildren(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Predicted and measured" }, table([
      ...(state.report.runs.length > 1 ? [{ name: "run", get: (r) => r.run.name }] : []), { name: "figure", get: (r) => r.f.label || r.f.name }, { name: "predicted", n: true, get: (r) => figure(r.f, r.f.predicted) }, { name: "measured", n: true, get: (r) => figure(r.f) },
      { name: "difference", n: true, get: (r) => r.d === 0 && r.f.predicted ? h("span", { class: "good" }, "exact") : r.f.predicted ? signed(r.d) : "–" }, ...(rows.some((r) => r.d) ? [{ name: "", class: "wide", get: (r) => r.d ? differenceBar(r.d, top) : "" }] : [])], rows, { class: "forecasts" })));
  },
});

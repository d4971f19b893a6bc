// Owns memory over the run: the stack with budget and peak, the ranks beside each other,
// and who holds what at the selected moment.

const memory = { stack: null, tiers: "both", only: null, rows: [] };
const shownTiers = () => ({ device: memory.tiers !== "host", host: memory.tiers !== "device" && memory.stack.tops.host > 0 });
const moment = () => state.hover !== null ? state.hover : pinned();

const borderAt = (t) => list(state.data.steps).find((y) => t >= y.begin && t <= y.end);
const outside = (t) => {
  const { steps } = state.data;
  return !steps.length ? null : t < steps[0].begin ? "before the first step" : t > steps[steps.length - 1].end ? "after the last step" : "between steps";
};
const momentText = (t) => {
  const step = borderAt(t), i = memory.stack.index(t);
  return [state.data.memory.peak.t === memory.stack.times[i] ? "the peak" : null, step ? "step " + step.step : outside(t),
    step ? millis(t - step.begin) + " into it" : null].filter(Boolean).join(", ");
};

const drawMemory = (plot, ctx) => {
  const { stack } = memory, { data } = state, tiers = shownTiers();
  plot.timeAxis(ctx);
  const scale = plot.scale = stack.draw(plot, ctx, tiers, data.budget, memory.only);
  if (!scale) return;
  stepStrip(plot, ctx);
  if (tiers.host && tiers.device) {
    ctx.fillStyle = paint.css("soft");
    ctx.textAlign = "left";
    if (scale.zero - plot.top > 40) plot.pill(ctx, "device ↑", plot.w - plot.right - 4, scale.zero - 12, paint.css("ink"), "right");
    if (plot.bottomAt - scale.zero > 24) plot.pill(ctx, "host ↓", plot.w - plot.right - 4, scale.zero + 13, paint.css("ink"), "right");
  }
  if (data.budget && tiers.device) {
    const y = scale.y(data.budget), inside = data.budget <= scale.up;
    if (inside) {
      ctx.strokeStyle = paint.css("budget");
      ctx.lineWidth = 1.5;
      ctx.setLineDash([6, 4]);
      ctx.beginPath();
      ctx.moveTo(plot.left, y);
      ctx.lineTo(plot.w - plot.right, y);
      ctx.stroke();
      ctx.setLineDash([]);
    }
    plot.pill(ctx, "budget " + bytes(data.budget) + (inside ? "" : ", far above"), plot.w - plot.right - 4, inside ? y + (y - 24 < plot.top ? 12 : -11) : plot.top + 10, paint.css("budget"), "right");
  }
  const { peak } = data.memory;
  if (tiers.device && peak.bytes) {
    const x = plot.x(peak.t), y = scale.y(peak.bytes);
    if (x >= plot.left - 1 && x <= plot.w - plot.right + 1) {
      ctx.fillStyle = paint.css("panel");
      ctx.strokeStyle = paint.css("ink");
      ctx.lineWidth = 2;
      ctx.beginPath();
      ctx.arc(x, y, 4.5, 0, 7);
      ctx.fill();
      ctx.stroke();
      plot.pill(ctx, "peak " + bytes(peak.bytes), x + (x > plot.w - 120 ? -10 : 10), y - 2, paint.css("ink"), x > plot.w - 120 ? "right" : "left");
    }
  }
};
// stepStrip draws the steps above the chart. Detailed ones have a coloured line.
const stepStrip = (plot, ctx) => {
  const { steps, details } = state.data;
  if (!steps.length) return;
  const wide = (plot.x(steps[0].end) - plot.x(steps[0].begin));
  const each = Math.max(1, Math.ceil(46 / Math.max(wide, 0.01)));
  ctx.textAlign = "center";
  ctx.lineWidth = 1;
  plot.clip(ctx, () => {
    steps.forEach((x, i) => {
      const a = plot.x(x.begin), b = plot.x(x.end);
      if (b < plot.left || a > plot.w) return;
      if (wide > 7) {
        ctx.strokeStyle = paint.css("panel");
        ctx.globalAlpha = 0.45;
        ctx.beginPath();
        ctx.moveTo(Math.round(a) + 0.5, 4);
        ctx.lineTo(Math.round(a) + 0.5, plot.bottomAt);
        ctx.stroke();
        ctx.globalAlpha = 1;
      }
      if (details.some((d) => d.step === x.step)) {
        ctx.fillStyle = paint.css("accent");
        ctx.fillRect(a + 0.5, 16, Math.max(b - a - 1, 2), 2.5);
      }
      if (i % each === 0 || wide > 46) {
        ctx.fillStyle = paint.css("soft");
        const again = i > 0 && steps[i - 1].step === x.step;
        ctx.fillText((i === 0 && wide > 60 ? "step " : "") + x.step + (again && wide > 60 ? " again" : ""), (Math.max(a, plot.left) + Math.min(b, plot.w - plot.right)) / 2, 8);
      }
    });
  });
};
const overMemory = (plot, ctx) => {
  if (!plot.scale) return;
  const mark = (t, color, dash) => plot.clip(ctx, () => plot.line(ctx, t, color, dash));
  mark(pinned(), paint.css("accent"));
  if (state.hover !== null) {
    mark(state.hover, paint.css("ink"), [3, 3]);
    const { stack } = memory, i = stack.index(state.hover), tiers = shownTiers();
    if (tiers.device) plot.pill(ctx, bytes(stack.totals.device[i]), plot.x(state.hover), plot.top + 6, paint.css("ink"));
  }
};

// foldSmall joins owners that never hold a two-hundredth of their tier's peak into one
// band, so that the large ones stand out. The table has all of them.
const foldSmall = (series) => {
  const out = [];
  for (const tier of ["device", "host"]) {
    const mine = series.filter((x) => x.tier === tier), top = most(mine.map((x) => most(x.bytes)));
    const small = mine.filter((x) => !x.saved && most(x.bytes) * 200 < top);
    if (small.length < 2) { out.push(...mine); continue; }
    out.push({ tier, name: "small owners (" + small.length + ")", saved: false, bytes: small[0].bytes.map((_, i) => sum(small.map((x) => x.bytes[i]))) }, ...mine.filter((x) => !small.includes(x)));
  }
  return out;
};

// The read-out lists the bands from top to bottom. Its rows are made once; only their
// numbers change.
const makeReadout = () => {
  const { stack } = memory, row = (tier) => (band) => {
    const value = h("span", { class: "n" }), variable = paint.variable(band.name, band.saved);
    const button = h("button", {
      type: "button", class: "band", "aria-pressed": String(memory.only === band.name), title: "Show only " + band.name,
      onclick: () => { memory.only = memory.only === band.name ? null : band.name; draw(); },
    }, swatch(variable, tier), h("span", { class: "name" }, band.name), value);
    memory.rows.push({ band, tier, value, button });
    return h("li", {}, button);
  };
  memory.rows = [];
  memory.sums = { device: h("b", { class: "n" }), host: h("b", { class: "n" }) };
  memory.when = h("p", { class: "when" });
  const part = (tier, name) => stack[tier].length && stack.tops[tier] > 0 ? [h("p", { class: "tier" }, name, memory.sums[tier]), h("ul", {}, [...stack[tier]].filter((b) => most(b.bytes) > 0).reverse().map(row(tier)))] : [];
  return [memory.when, ...part("device", "Device"), ...part("host", "Host")];
};
const tellMoment = () => {
  const { stack } = memory, t = moment(), i = stack.index(t);
  if (!stack.times.length) return;
  memory.when.textContent = (state.hover === null ? state.pin === null ? "At " : "Pinned: " : "Here: ") + momentText(t);
  for (const tier of ["device", "host"]) memory.sums[tier].textContent = bytes(stack.totals[tier][i]);
  for (const r of memory.rows) {
    const n = r.band.bytes[i];
    r.value.textContent = n ? bytes(n) : "–";
    r.button.classList.toggle("none", !n);
  }
};

const toTensors = (focus) => {
  const x = state.sections.find((y) => y.id === "tensors");
  x.element.scrollIntoView({ behavior: calm() ? "auto" : "smooth", block: "nearest" });
  if (focus) x.heading.focus({ preventScroll: true });
};

// The keys move from one drawn sample to the next, so that each press is visible.
const moveMoment = (by) => {
  const { stack } = memory, [from, to] = state.views.run.range;
  const at = columns(stack.times, stack.totals.device, from, to, Math.max(plotMemory.width / 3, 50)).filter((i) => stack.times[i] >= from && stack.times[i] <= to);
  const k = after(at.map((i) => stack.times[i]), moment()) - 1;
  const t = by === -Infinity ? stack.times[at[0]] : by === Infinity ? stack.times[at[at.length - 1]] : stack.times[at[clamp(k + by, 0, at.length - 1)]];
  if (t === undefined) return;
  hover(t);
  describe();
};
const describe = () => {
  const { stack } = memory, t = moment(), i = stack.index(t), el = plotMemory.element;
  el.setAttribute("aria-valuemin", state.views.run.all[0].toFixed(3));
  el.setAttribute("aria-valuemax", state.views.run.all[1].toFixed(3));
  el.setAttribute("aria-valuenow", t.toFixed(3));
  el.setAttribute("aria-valuetext", momentText(t) + ": device " + bytes(stack.totals.device[i]) + (stack.tops.host ? ", host " + bytes(stack.totals.host[i]) : ""));
};

const plotMemory = new Plot({
  view: state.views.run, label: "Memory over time: a moment", role: "slider", top: 22,
  height: () => innerWidth < 700 ? 280 : 400,
  drawBase: drawMemory, over: overMemory,
  move: (plot, x) => hover(plot.t(x)),
  leave: () => hover(null),
  pick: (plot, x) => { state.hover = null; pin(plot.t(x)); toTensors(false); },
  key: (e) => ({
    ArrowLeft: () => moveMoment(-1), ArrowRight: () => moveMoment(1), PageUp: () => moveMoment(-12), PageDown: () => moveMoment(12), Home: () => moveMoment(-Infinity), End: () => moveMoment(Infinity),
    Enter: () => { const t = moment(); state.hover = null; pin(t); toTensors(true); },
    " ": () => { const t = moment(); state.hover = null; pin(t); },
    Escape: () => { state.hover = null; memory.only = null; pin(null); },
  })[e.key],
});

const ranksStrip = () => {
  const { ranks } = theRun();
  if (ranks.length < 2) return null;
  const top = Math.max(most(ranks.map((r) => Math.max(r.memory.peak.bytes, r.budget && r.budget < r.memory.peak.bytes * 3 ? r.budget : 0))), 1);
  return h("div", { class: "ranks", role: "group", "aria-label": "Rank" }, ranks.map((r, i) => h("button", {
    type: "button", "aria-pressed": String(i === state.rank), title: "Rank " + r.rank + ": peak " + bytes(r.memory.peak.bytes), onclick: () => choose(undefined, i),
  }, h("span", {}, "rank " + r.rank), bar({ value: r.memory.peak.bytes, top, limit: r.budget }), h("small", {}, bytes(r.memory.peak.bytes)))));
};

section({
  id: "memory", name: "Memory", title: "Memory over time",
  about: "Point at a moment to see what is alive. Click or press Enter to list its tensors. Drag to zoom in; double-click to zoom out.",
  there: () => !!state.data && state.data.memory.t.length > 0,
  draw(x) {
    const { data } = state;
    if (memory.of !== data) { memory.of = data; memory.stack = new Stack(data.memory.t, foldSmall(data.memory.series)); }
    if (!x.made) {
      x.made = { strip: h("div"), side: h("div", { class: "readout", "aria-label": "What is alive" }), note: h("p", { class: "soft small" }), rates: ratesTrack(), table: alternative("memory over time", memoryTable) };
      x.body.append(x.made.strip, h("div", { class: "beside" }, h("div", { class: "tracks" }, plotMemory.element, x.made.rates.element), x.made.side), x.made.note, x.made.table.element, x.made.rates.table.element);
    }
    const strip = ranksStrip();
    const had = x.made.strip.contains(document.activeElement);
    x.made.strip.replaceChildren(...(strip ? [strip] : []));
    if (had) { const el = x.made.strip.querySelector("[aria-pressed=true]"); if (el) el.focus(); }
    const both = memory.stack.tops.host > 0;
    x.tools.replaceChildren(both ? segments("Tiers", [{ value: "both", label: "Both tiers" }, { value: "device", label: "Device" }, { value: "host", label: "Host" }], memory.tiers, (v) => { memory.tiers = v; draw(); }) : "",
      h("button", { type: "button", title: "Show the whole run (0)", onclick: () => state.views.run.reset() }, "Whole run"),
      h("button", { type: "button", title: "Go to the peak (p)", onclick: goToPeak }, "Peak"));
    x.made.note.textContent = plural(data.memory.t.length, "sample") + (data.memory.events ? " of " + plural(data.memory.events, "event") : "") + "; each shows the highest moment of its stretch of time, so no peak is lost."
      + (both ? " Host memory is hatched." : "") + (data.details.length ? " Steps with a coloured line have details." : "") + (data.cut ? " Pauses between steps, " + millis(data.cut) + " in all, are shortened" + (inTurns(theRun()) ? "; other runs of the comparison trained meanwhile." : ".") : "");
    plotMemory.draw(true);
    x.made.rates.draw();
    x.made.side.replaceChildren(...makeReadout());
    tellMoment();
    describe();
    x.made.table.draw();
  },
  hover() { plotMemory.follow(); plotRates.follow(); tellMoment(); },
});
const goToPeak = () => {
  state.hover = null;
  const { peak } = state.data.memory, v = state.views.run;
  if (v.zoomed && (peak.t < v.range[0] || peak.t > v.range[1])) v.reset();
  pin(null);
  say("peak: " + bytes(peak.bytes) + ", " + momentText(peak.t));
};
// The runs of a comparison train in turn, step by step. They have a ratio and losses.
const inTurns = (run) => !!named(run, "step_ratio") && run.steps.loss.length > 0;
// The table has a row for each step: its heaviest sample.
const memoryTable = () => {
  const { stack } = memory, { data } = state, rows = [];
  const borders = data.steps.length ? data.steps : [{ step: null, begin: -Infinity, end: Infinity }];
  for (const b of borders) {
    let top = -1;
    for (let i = after(stack.times, b.begin) - 1; i < stack.times.length && (i < 0 || stack.times[i] <= b.end); i++) {
      if (i >= 0 && stack.times[i] >= b.begin && (top < 0 || stack.totals.device[i] > stack.totals.device[top])) top = i;
    }
    if (top >= 0) rows.push({ step: b.step, i: top });
  }
  return table([{ name: "step", get: (r) => r.step === null ? "all" : String(r.step) }, { name: "most at", n: true, get: (r) => millis(stack.times[r.i]) },
    { name: "device", n: true, get: (r) => bytes(stack.totals.device[r.i]) }, { name: "host", n: true, get: (r) => bytes(stack.totals.host[r.i]) },
    ...data.memory.series.map((b) => ({ name: b.name + (b.tier === "host" ? " (host)" : ""), n: true, get: (r) => bytes(b.bytes[r.i]) }))], rows);
};

// Owns the timelines of streams in a detailed step: a lane for each stream, with hatched
// waits.

const KINDS = { launch: "kernel", copy: "copy", graph: "graph", wait: "wait", work: "work" };
// Only waits of compute cost time. Other streams that wait are idle.
const mainStream = (d) => d.streams.find((x) => x.name === "compute") || d.streams[0];
const kindOf = (stream, i) => stream.what[i] === "wait" && stream !== mainStream(theDetail()) ? "idle" : KINDS[stream.what[i]] || stream.what[i];
const LANE = 26, LABEL = 18, GAP = 8;
const laneTop = (i) => 8 + i * (LANE + LABEL + GAP) + LABEL;
const picked = { lane: 0, span: -1 };

const spanName = (stream, i) => stream.of[i] >= 0 && stream.names[stream.of[i]] ? stream.names[stream.of[i]] : kindOf(stream, i);
const spanRate = (stream, i) => stream.bytes[i] > 0 && stream.took[i] > 0 ? stream.bytes[i] / stream.took[i] * 1000 : 0;
// A prefix that all names of a stream share says nothing in a narrow box.
const common = (names) => {
  if (names.length < 2) return 0;
  let n = 0;
  while (n < names[0].length && names.every((x) => x[n] === names[0][n])) n++;
  return names[0].slice(0, n).search(/[^_./ ]*$/);
};
const spanText = (stream, i, d) => [spanName(stream, i), kindOf(stream, i) !== spanName(stream, i) ? kindOf(stream, i) : null, millis(stream.took[i]), "from " + millis(stream.begin[i] - d.begin),
  stream.bytes[i] ? bytes(stream.bytes[i]) : null, spanRate(stream, i) ? rate(spanRate(stream, i)) : null].filter(Boolean).join(", ");

// Kernels have two shades by name, so that neighbours differ.
const spanFill = (ctx, stream, i, waits) => stream.what[i] === "wait" ? waits : paint.css({ launch: "k-launch", copy: "k-copy", graph: "k-graph", work: "k-work" }[stream.what[i]] + (stream.of[i] % 2 === 1 ? "2" : ""));

const drawStreams = (plot, ctx) => {
  const d = theDetail(), [from, to] = plot.view.range;
  plot.timeAxis(ctx);
  const main = mainStream(d), waits = hatch(ctx, paint.css("wait"), paint.css("rail")), idle = hatch(ctx, paint.css("line"), paint.css("rail"));
  d.streams.forEach((stream, lane) => {
    const y = laneTop(lane);
    ctx.fillStyle = paint.css("rail");
    ctx.fillRect(plot.left, y, plot.width, LANE);
    ctx.textAlign = "left";
    ctx.fillStyle = paint.css("ink");
    ctx.font = "600 12px " + paint.css("font");
    ctx.fillText(stream.name, plot.left, y - 9);
    const w = ctx.measureText(stream.name).width;
    ctx.font = "11px " + paint.css("font");
    ctx.fillStyle = paint.css("soft");
    ctx.fillText("busy " + percent(stream.busy) + (stream.waited ? (stream === main ? ", waits " : ", idle ") + percent(stream.waited) : ""), plot.left + w + 8, y - 9);
    plot.clip(ctx, () => drawLane(plot, ctx, stream, y, from, to, stream === main ? waits : idle));
  });
};
const drawLane = (plot, ctx, stream, y, from, to, waits) => {
  const skip = common(stream.names);
  const { begin, took } = stream, last = begin.length;
  // Spans of a stream do not overlap: the one before the first inside may reach in.
  let edge = -1;
  for (let i = Math.max(after(begin, from) - 1, 0); i < last && begin[i] <= to; i++) {
    const a = plot.x(begin[i]), b = plot.x(begin[i] + took[i]);
    if (b < plot.left) continue;
    // What ends within a pixel that is painted already cannot be seen.
    if (b <= edge) continue;
    const w = Math.max(b - a - (b - a > 3 ? 0.75 : 0), 0.75);
    ctx.fillStyle = spanFill(ctx, stream, i, waits);
    ctx.fillRect(a, y, w, LANE);
    edge = Math.max(Math.floor(b), a + 0.5);
    const left = Math.max(a, plot.left), room = Math.min(a + w, plot.w - plot.right) - left;
    if (room > (stream.what[i] === "wait" ? 64 : 34)) {
      const whole = spanName(stream, i), name = stream.of[i] >= 0 ? whole.slice(skip) : whole, fits = Math.floor((room - 10) / 6.1);
      ctx.fillStyle = stream.what[i] === "wait" ? paint.css(stream === mainStream(theDetail()) ? "ink" : "soft") : paint.css("on-span");
      if (fits >= 3) ctx.fillText(name.length > fits ? name.slice(0, fits - 1) + "…" : name, left + 5, y + LANE / 2 + 0.5);
    }
  }
};
const overStreams = (plot, ctx) => {
  const d = theDetail();
  if (!d) return;
  plot.clip(ctx, () => {
    if (within(d, pinned())) plot.line(ctx, pinned(), paint.css("accent"));
    if (state.hover !== null && within(d, state.hover)) plot.line(ctx, state.hover, paint.css("ink"), [3, 3]);
    const stream = d.streams[picked.lane];
    if (stream && picked.span >= 0 && picked.span < stream.begin.length) {
      const a = plot.x(stream.begin[picked.span]), b = plot.x(stream.begin[picked.span] + stream.took[picked.span]);
      ctx.strokeStyle = paint.css("ink");
      ctx.lineWidth = 2;
      ctx.strokeRect(a, laneTop(picked.lane), Math.max(b - a, 2), LANE);
    }
  });
};
const spanAt = (plot, x, y) => {
  const d = theDetail(), lane = d.streams.findIndex((_, i) => y >= laneTop(i) - 2 && y <= laneTop(i) + LANE + 2);
  if (lane < 0) return null;
  const stream = d.streams[lane], t = plot.t(x), near = plot.t(plot.left + 3) - plot.t(plot.left);
  for (let i = Math.min(after(stream.begin, t + near) - 1, stream.begin.length - 1), k = 0; i >= 0 && k < 4; i--, k++) {
    if (t <= stream.begin[i] + stream.took[i] + near) return { lane, span: i };
  }
  return null;
};
const row = (name, value) => value ? h("div", {}, h("span", {}, name), h("b", {}, value)) : null;
const spanTip = (stream, i, d) => [h("p", { class: "tip-title" }, spanName(stream, i)), row("kind", kindOf(stream, i)), row("took", millis(stream.took[i])), row("from", millis(stream.begin[i] - d.begin)),
  row("bytes", stream.bytes[i] ? bytes(stream.bytes[i]) : ""), row("rate", spanRate(stream, i) ? rate(spanRate(stream, i)) : "")].filter(Boolean);

// stepSpan selects the next or previous span; stepLane the span of another lane at the same
// time.
const showSpan = () => {
  const d = theDetail(), stream = d.streams[picked.lane], v = state.views.step, begin = stream.begin[picked.span], end = begin + stream.took[picked.span];
  const [a, b] = v.range;
  if (begin < a || end > b) v.set(begin - (b - a) / 2, begin + (b - a) / 2);
  plotStreams.follow();
  const text = stream.name + ": " + spanText(stream, picked.span, d);
  $("span-said").textContent = text;
};
const stepSpan = (by) => {
  const stream = theDetail().streams[picked.lane];
  if (!stream || !stream.begin.length) return;
  picked.span = picked.span < 0 ? clamp(after(stream.begin, state.views.step.range[0]) - 1, 0, stream.begin.length - 1) : clamp(picked.span + by, 0, stream.begin.length - 1);
  showSpan();
};
const stepLane = (by) => {
  const { streams } = theDetail(), old = streams[picked.lane], t = picked.span >= 0 && old ? old.begin[picked.span] : state.views.step.range[0];
  picked.lane = clamp(picked.lane + by, 0, streams.length - 1);
  if (!streams[picked.lane].begin.length) { picked.span = -1; plotStreams.follow(); return; }
  picked.span = clamp(after(streams[picked.lane].begin, t) - 1, 0, streams[picked.lane].begin.length - 1);
  showSpan();
};

const plotStreams = new Plot({
  view: state.views.step, label: "Timelines of streams. Arrow keys go from span to span and from stream to stream.", top: 4, origin: () => theDetail() ? theDetail().begin : 0,
  height: () => laneTop(theDetail() ? theDetail().streams.length - 1 : 0) + LANE + 30,
  drawBase: drawStreams, over: overStreams,
  move(plot, x, y) {
    hover(plot.t(x));
    const at = spanAt(plot, x, y), d = theDetail(), box = plot.element.getBoundingClientRect();
    plot.element.classList.toggle("pointing", !!at);
    if (at) tip.show(box.left + x, box.top + y, ...spanTip(d.streams[at.lane], at.span, d)); else tip.hide();
  },
  leave() { hover(null); tip.hide(); },
  pick(plot, x, y) {
    const at = spanAt(plot, x, y);
    if (at) { Object.assign(picked, at); showSpan(); }
    state.hover = null;
    pin(plot.t(x));
  },
  key: (e) => ({
    ArrowLeft: () => stepSpan(-1), ArrowRight: () => stepSpan(1), ArrowUp: () => stepLane(-1), ArrowDown: () => stepLane(1), Home: () => stepSpan(-Infinity), End: () => stepSpan(Infinity),
    Enter: () => { const d = theDetail(), x = d.streams[picked.lane]; if (picked.span >= 0) { state.hover = null; pin(x.begin[picked.span]); toTensors(true); } },
    Escape: () => { picked.span = -1; $("span-said").textContent = ""; plotStreams.follow(); },
    f: () => { const x = theDetail().streams[picked.lane], i = picked.span; if (i >= 0) state.views.step.set(x.begin[i] - x.took[i] * 0.2, x.begin[i] + x.took[i] * 1.2); },
  })[e.key],
});

const kindLegend = () => {
  const d = theDetail(), seen = new Set(d.streams.flatMap((x) => [...new Set(x.what.map((w) => w === "wait" && x !== mainStream(d) ? "idle" : w))]));
  return h("ul", { class: "legend" }, Object.entries({ ...KINDS, idle: "idle" }).filter(([k]) => seen.has(k)).map(([k, name]) => h("li", {}, h("i", { class: "swatch" + (k === "wait" || k === "idle" ? " wait" : ""), style: { "--c": k === "idle" ? "var(--line)" : "var(--k-" + k + ")" }, "aria-hidden": "true" }), name)));
};

// hidden describes how much of the copies overlapped with work of compute. It says nothing
// of a step whose shortest spans were left out, because it would count too little.
const hidden = (d) => {
  const main = mainStream(d);
  let all = 0, under = 0;
  for (const x of d.streams) {
    if (d.cut || x === main) continue;
    x.begin.forEach((a, i) => {
      if (x.what[i] !== "copy") return;
      const b = a + x.took[i];
      all += b - a;
      for (let k = Math.max(after(main.begin, a) - 1, 0); k < main.begin.length && main.begin[k] < b; k++) {
        if (main.what[k] !== "wait") under += Math.max(Math.min(b, main.begin[k] + main.took[k]) - Math.max(a, main.begin[k]), 0);
      }
    });
  }
  return all ? " Copies on other streams took " + millis(all) + "; " + percent(under / all) + " of it overlapped with work of " + main.name + "." : "";
};

section({
  id: "streams", name: "Step", title: "Inside a step",
  about: "The memory of saved tensors, what each stream did, and where it waited. Point at a span for its numbers, drag to zoom, and use the arrow keys to go from span to span.",
  there: () => !!theDetail() && (theDetail().streams.length > 0 || theDetail().storages.length > 0),
  draw(x) {
    const d = theDetail();
    if (!x.made) {
      x.made = { legend: h("div"), saved: h("h3", {}, "Saved tensors, by group"), note: h("p", { class: "soft small" }), table: alternative("spans of the step", spansTable) };
      x.body.append(x.made.saved, plotSaved.element, h("div", { class: "track-head" }, h("h3", {}, "Streams"), x.made.legend), plotStreams.element, h("p", { id: "span-said", class: "small span-said", role: "status" }), x.made.note, x.made.table.element);
    }
    if (x.of !== d) { x.of = d; picked.span = -1; picked.lane = 0; $("span-said").textContent = ""; }
    const had = x.tools.contains(document.activeElement);
    x.tools.replaceChildren(detailPicker(), h("button", { type: "button", title: "Show the whole step (0)", onclick: () => state.views.step.reset() }, "Whole step"));
    if (had) { const el = x.tools.querySelector("[aria-checked=true]"); if (el) el.focus(); }
    x.made.legend.replaceChildren(kindLegend());
    x.made.note.textContent = "Step " + d.step + " took " + millis(d.end - d.begin) + "." + (d.cut ? " Left out: " + plural(d.cut, "span") + " (the shortest)." : "") + hidden(d);
    const any = d.storages.length > 0;
    x.made.saved.hidden = plotSaved.element.hidden = !any;
    if (any) plotSaved.draw(true);
    plotStreams.draw(true);
    x.made.table.draw();
  },
  hover() { plotSaved.follow(); plotStreams.follow(); },
});
// The longest spans come first, and the table ends after them.
const spansTable = () => {
  const d = theDetail(), rows = d.streams.flatMap((stream) => stream.begin.map((_, i) => ({ stream, i })));
  rows.sort((a, b) => b.stream.took[b.i] - a.stream.took[a.i]);
  return table([{ name: "stream", get: (r) => r.stream.name }, { name: "what", get: (r) => spanName(r.stream, r.i) }, { name: "kind", get: (r) => kindOf(r.stream, r.i) },
    { name: "from", n: true, get: (r) => millis(r.stream.begin[r.i] - d.begin) }, { name: "took", n: true, get: (r) => millis(r.stream.took[r.i]) },
    { name: "bytes", n: true, get: (r) => r.stream.bytes[r.i] ? bytes(r.stream.bytes[r.i]) : "–" }, { name: "rate", n: true, get: (r) => spanRate(r.stream, r.i) ? rate(spanRate(r.stream, r.i)) : "–" }], rows.slice(0, 200));
};

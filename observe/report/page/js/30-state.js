// Owns the state: the report, the selection, and reading blocks of data. Sections
// register what they draw, and a change of the selection redraws what depends on it.

const decode = async (text) => {
  const raw = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  if (typeof DecompressionStream === "undefined") return JSON.parse(new TextDecoder().decode(inflate(raw)));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

// View is a range of time that charts share. Null bounds mean all of it, so that a live
// chart grows until the user zooms.
class View {
  constructor() { this.from = null; this.to = null; this.all = [0, 1]; this.drawn = new Set(); }
  get range() { return this.from === null ? this.all : [this.from, this.to]; }
  get zoomed() { return this.from !== null; }
  set(from, to) {
    const [a, b] = this.all, whole = b - a;
    const width = clamp(to - from, whole * 1e-6, whole);
    const begin = clamp(from, a, b - width);
    if (width >= whole * 0.9999) this.from = this.to = null;
    else { this.from = begin; this.to = begin + width; }
    this.changed();
  }
  reset() { this.from = this.to = null; this.changed(); }
  zoom(factor, around) {
    const [a, b] = this.range, x = around === undefined ? (a + b) / 2 : around;
    this.set(x - (x - a) * factor, x + (b - x) * factor);
  }
  pan(share) {
    const [a, b] = this.range, d = (b - a) * share;
    if (this.zoomed) this.set(a + d, b + d);
  }
  changed() { for (const draw of this.drawn) draw(); }
}

const state = {
  report: null, run: 0, rank: 0, detail: 0, // indices
  data: null,          // the rank in full
  pin: null,           // a moment, in ms, or null for the peak
  hover: null,         // a moment
  views: { run: new View(), step: new View() },
  loaded: new Map(),   // "run-rank" to a promise of a rank
  sections: [],        // {id, name, draw, hover}
};

const theRun = () => state.report.runs[state.run];
const theRank = () => theRun().ranks[state.rank];
const theDetail = () => list(state.data && state.data.details)[state.detail];
const pinned = () => state.pin !== null ? state.pin : state.data ? state.data.memory.peak.t : 0;
const within = (d, t) => t >= d.begin && t <= d.end;

// Fields that Go writes as null for empty slices become empty lists once, here.
const tidyRank = (r) => {
  r.memory.t = list(r.memory.t); r.memory.series = list(r.memory.series);
  for (const k of ["details", "policy", "pools", "counts", "steps"]) r[k] = list(r[k]);
  for (const k of ["t", "out", "in"]) r.rates[k] = list(r.rates[k]);
  r.rates.each = r.rates.t.length > 1 ? r.rates.t[1] - r.rates.t[0] : 0; // before pauses are cut
  for (const d of r.details) { d.storages = list(d.storages); d.streams = list(d.streams); for (const x of d.storages) x.stays = list(x.stays); }
  for (const d of r.details) for (const x of d.streams) for (const k of ["names", "begin", "took", "what", "of", "bytes"]) x[k] = list(x[k]);
  return cutPauses(r);
};
const tidy = (report) => {
  report.runs = list(report.runs);
  report.missing = list(report.missing);
  for (const run of report.runs) {
    for (const k of ["figures", "ranks", "missing"]) run[k] = list(run[k]);
    for (const k of ["step", "loss", "tokens_per_s", "ms", "device_peak", "host_peak", "spills", "reruns", "held_at", "held"]) run.steps[k] = list(run.steps[k]);
    run.environment = run.environment || {};
  }
  return report;
};

const loadRank = (run, rank) => {
  const key = run + "-" + rank;
  if (!state.loaded.has(key)) {
    const block = $("rank-" + key);
    state.loaded.set(key, block ? decode(block.textContent).then(tidyRank) : Promise.resolve(tidyRank(state.report.runs[run].ranks[rank])));
  }
  return state.loaded.get(key);
};

// draw redraws the top and the sections near the window. It redraws the others when they
// come near.
const draw = () => {
  place();
  drawTop();
  drawBar();
  for (const x of state.sections) x.stale = true;
  drawSeen();
};
const drawSeen = () => {
  for (const x of state.sections) {
    if (!x.stale || !x.near) continue;
    x.stale = false;
    x.draw();
  }
};
let hoverAsked = false;
const hover = (t) => {
  state.hover = t;
  if (hoverAsked) return;
  hoverAsked = true;
  requestAnimationFrame(() => {
    hoverAsked = false;
    for (const x of state.sections) if (x.hover && x.near && !x.stale) x.hover();
  });
};

// The page opens with the run that has the least device memory, and with the rank that
// has the peak of that run.
const leastOf = (values, score) => values.reduce((best, x, i) => score(x) < score(values[best]) ? i : best, 0);
const fullest = (run) => leastOf(run.ranks, (r) => -r.memory.peak.bytes);
const lookFirst = () => {
  const { runs } = state.report;
  const peak = (run) => { const f = devicePeak(run); return f ? f.value : Infinity; };
  state.run = leastOf(runs, peak);
  if (theRun()) state.rank = fullest(theRun());
};

// settle makes the selection valid for the report and loads its rank.
const settle = async () => {
  const { report } = state;
  if (!report.runs.length) { state.data = null; draw(); return; }
  state.run = clamp(state.run, 0, report.runs.length - 1);
  state.rank = clamp(state.rank, 0, Math.max(theRun().ranks.length - 1, 0));
  const run = state.run, rank = state.rank;
  const data = theRank() ? await loadRank(run, rank) : null;
  if (run !== state.run || rank !== state.rank) return; // the selection has changed meanwhile
  state.data = data;
  if (data) {
    paint.learn(foldSmall(data.memory.series));
    const t = data.memory.t, ends = [...data.steps.map((x) => x.end), ...data.details.map((x) => x.end), t.length ? t[t.length - 1] : 0];
    const begins = [...data.steps.map((x) => x.begin), ...(t.length ? [t[0]] : [])];
    state.views.run.all = [begins.length ? Math.min(...begins) : 0, Math.max(most(ends), 1e-3)];
    state.detail = clamp(state.detail, 0, Math.max(data.details.length - 1, 0));
    spanStep();
  }
  draw();
  remember();
};
const spanStep = () => {
  const d = theDetail();
  if (d) state.views.step.all = [d.begin, Math.max(d.end, d.begin + 1e-6)];
};
const remember = () => {
  const run = theRun();
  keep.set(() => sessionStorage, "shown", JSON.stringify({
    run: run.name, rank: theRank() && theRank().rank, pin: state.pin,
    views: Object.values(state.views).map((v) => [v.from, v.to]), step: theDetail() && theDetail().step,
  }));
};

// showMoment selects the detailed step that holds a moment, if there is one.
const showMoment = (t) => {
  const i = list(state.data && state.data.details).findIndex((d) => within(d, t));
  if (i < 0 || i === state.detail) return;
  state.detail = i;
  state.views.step.from = state.views.step.to = null;
  spanStep();
};
const choose = async (run, rank) => {
  const n = state.report.runs.length;
  if (run !== undefined && run !== state.run) {
    state.run = (run + n) % n;
    state.rank = fullest(theRun()); // its peak is that of the run
  }
  if (rank !== undefined) {
    const m = theRun().ranks.length;
    if (m) state.rank = (rank + m) % m;
  }
  state.pin = null;
  for (const v of Object.values(state.views)) v.from = v.to = null;
  await settle();
  if (state.data) { showMoment(pinned()); draw(); }
  say((theRun().name || "run") + (theRank() ? ", rank " + theRank().rank : ""));
};
const pin = (t) => {
  state.pin = t;
  showMoment(pinned());
  draw();
  remember();
};
const chooseDetail = (i) => {
  const details = list(state.data && state.data.details);
  if (!details.length) return;
  state.detail = (i + details.length) % details.length;
  state.views.step.from = state.views.step.to = null;
  spanStep();
  const d = theDetail();
  if (!within(d, pinned())) state.pin = within(d, state.data.memory.peak.t) ? null : heaviest(d);
  draw();
  remember();
  say("step " + d.step);
};
// heaviest returns the moment with the most device memory in a step.
const heaviest = (d) => {
  const { t, series } = state.data.memory, device = series.filter((x) => x.tier === "device");
  let best = (d.begin + d.end) / 2, top = -1;
  for (let i = 0; i < t.length; i++) {
    if (!within(d, t[i])) continue;
    const n = sum(device.map((x) => x.bytes[i]));
    if (n > top) { top = n; best = t[i]; }
  }
  return best;
};

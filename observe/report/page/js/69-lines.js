// Owns charts by step, drawn by uPlot: loss, throughput, times, pools.

// Lines is one chart. Series are {name, values, variable, text, points, dash, area}.
class Lines {
  constructor(label, height) {
    this.told = h("span", { class: "told" });
    this.place = h("div", { class: "lines", tabindex: "0", role: "application", "aria-roledescription": "chart by step", "aria-label": label });
    this.title = h("h3", {}, label);
    this.height = height;
    this.element = h("div", { class: "line-chart" }, h("div", { class: "line-head" }, this.title, this.told), this.place);
    new ResizeObserver(() => this.fit()).observe(this.place);
    this.place.addEventListener("keydown", (e) => this.keys(e));
    this.place.addEventListener("blur", () => { if (this.plot) this.plot.setCursor({ left: -10, top: -10 }); });
  }
  fit() {
    const w = this.place.clientWidth;
    if (this.plot && w && Math.abs(w - this.plot.width) > 0.5) this.plot.setSize({ width: w, height: this.height });
  }
  draw(x, series, axis) {
    Object.assign(this, { x, series });
    const data = [x, ...series.map((y) => y.values)], look = paint.css("panel") + series.map((y) => y.name + y.variable).join();
    if (this.plot && this.look === look) {
      const { min, max } = this.plot.scales.x, old = this.plot.data[0], zoomed = min > old[0] || max < old[old.length - 1];
      this.plot.setData(data, !zoomed);
      if (zoomed) this.plot.redraw();
    } else this.make(data, axis, look);
    this.tell(null);
  }
  make(data, axis, look) {
    if (this.plot) this.plot.destroy();
    this.look = look;
    const font = "11px " + paint.css("font"), soft = paint.css("soft"), grid = { stroke: paint.css("grid"), width: 1 };
    const whole = (u, values) => values.map((v) => Number.isInteger(v) ? String(v) : "");
    this.plot = new uPlot({
      width: Math.max(this.place.clientWidth, 200), height: this.height, legend: { show: false }, padding: [8, 10, 0, 0],
      cursor: { sync: { key: "steps" }, y: false, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false, range: (u, lo, hi) => lo === hi ? [lo - 1, hi + 1] : [lo, hi] }, y: { range: axis.range } },
      axes: [{ stroke: soft, font, grid: { show: false }, ticks: { ...grid, size: 4 }, size: 26, gap: 3, values: whole }, { stroke: soft, font, grid, ticks: { show: false }, size: 58, gap: 6, values: (u, values) => values.map((v) => axis.text(v)), space: 34, incrs: axis.incrs }],
      series: [{}, ...this.series.map((y) => ({
        stroke: paint.css(y.variable), width: y.points ? 0 : 1.75, dash: y.dash, fill: y.area ? paint.css(y.variable) + "38" : undefined, spanGaps: true,
        points: { show: y.points || data[0].length < 3, size: y.points ? 7 : 6, fill: paint.css(y.variable) }, paths: y.points ? () => null : undefined,
      }))],
      hooks: { setCursor: [(u) => this.tell(u.cursor.idx)] },
    }, data, this.place);
  }
  // tell shows the values at a step, or at the last one.
  tell(index) {
    const i = index === null || index === undefined ? this.x.length - 1 : index;
    if (i < 0) return;
    const last = (y) => { for (let k = i; k >= 0; k--) if (y.values[k] !== null && y.values[k] !== undefined) return y.values[k]; return null; };
    this.told.replaceChildren(h("span", { class: "soft" }, "step " + this.x[i]), ...this.series.map((y) => {
      const v = y.points ? last(y) : y.values[i];
      return h("span", {}, swatch(y.variable), this.series.length > 1 ? y.name + " " : "", h("b", {}, v === null || v === undefined ? "–" : y.text(v)));
    }));
  }
  keys(e) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity, PageUp: -10, PageDown: 10 }[e.key];
    const u = this.plot;
    if (!u || e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.key === "0" || e.key === "Escape") u.setData(u.data, true);
    else if (by !== undefined) {
      const now = u.cursor.idx === null || u.cursor.idx === undefined ? this.x.length - 1 : u.cursor.idx, i = clamp(now + by, 0, this.x.length - 1);
      u.setCursor({ left: u.valToPos(this.x[i], "x"), top: 10 });
      say(this.title.textContent + ", " + this.told.textContent);
    } else return;
    e.preventDefault();
    e.stopPropagation();
  }
}

const trimmed = (text) => text.replace(/(\.\d*?)0+(?= |$)/, "$1").replace(/\.(?= |$)/, "");
const fromZero = (u, lo, hi) => [0, hi > 0 ? hi * 1.08 : 1];
const around = (u, lo, hi) => { const pad = (hi - lo) * 0.08 || Math.abs(hi) * 0.05 || 1; return [lo - pad, hi + pad]; };
const inBytes = { text: (v) => v ? trimmed(bytes(v)) : "0", range: fromZero, incrs: Array.from({ length: 50 }, (_, i) => 2 ** i) };
// Values that are not numbers are gaps.
const gaps = (values) => values.map((v) => Number.isFinite(v) ? v : null);
const heldBySteps = (x) => { const at = new Map(x.held_at.map((step, i) => [step, x.held[i]])); return x.step.map((step) => at.has(step) ? at.get(step) : null); };

const poolCharts = [];
section({
  id: "pools", name: "Pools", title: "Pools, by step",
  about: "The most that each pool used in a step, and its size.",
  there: () => !!state.data && state.data.pools.length > 0,
  draw(x) {
    const { pools } = state.data;
    if (!x.made) {
      x.made = { grid: h("div", { class: "grid2" }), table: alternative("pools by step", poolsTable) };
      x.body.append(x.made.grid, x.made.table.element);
    }
    while (poolCharts.length < pools.length) poolCharts.push(new Lines("Pool", 150));
    x.made.grid.replaceChildren(...pools.map((p, i) => {
      const c = poolCharts[i];
      c.title.textContent = p.name;
      c.place.setAttribute("aria-label", p.name);
      return c.element;
    }));
    pools.forEach((p, i) => {
      const text = (v) => poolText(p, v);
      poolCharts[i].draw(list(p.steps), [{ name: "size", values: list(p.size), variable: "soft", text, dash: [5, 3] }, { name: "used", values: list(p.most), variable: "g4", text: (v) => text(v) + share(p, v), area: true }],
        p.unit > 1 ? { text: count, range: fromZero } : inBytes);
    });
    x.made.table.draw();
  },
});
const share = (p, v) => { const top = most(list(p.size)); return top ? " (" + percent(v / top) + ")" : ""; };
const poolText = (p, v) => p.unit > 1 ? plural(v, "page") + ", " + bytes(v * p.unit) : bytes(v);
const poolsTable = () => {
  const rows = state.data.pools.flatMap((p) => list(p.steps).map((step, i) => ({ p, step, i })));
  return table([{ name: "pool", get: (r) => r.p.name }, { name: "step", n: true, get: (r) => String(r.step) }, { name: "used", n: true, get: (r) => poolText(r.p, r.p.most[r.i]) }, { name: "size", n: true, get: (r) => poolText(r.p, r.p.size[r.i]) }], rows.slice(0, 400));
};

const trainingCharts = {
  loss: new Lines("Loss", 210), speed: new Lines("Tokens a second", 210), time: new Lines("Step time", 210), memory: new Lines("Peak memory by step", 210),
};
section({
  id: "training", name: "Training", title: "Training, step by step",
  there: () => !!theRun() && theRun().steps.step.length > 0,
  draw(x) {
    const y = theRun().steps, c = trainingCharts, show = (chart, yes) => { chart.element.hidden = !yes; return yes; };
    if (!x.made) {
      x.made = { note: h("p", { class: "soft small" }), table: alternative("all steps", stepsTable) };
      x.body.append(h("div", { class: "grid2" }, Object.values(c).map((chart) => chart.element)), x.made.note, x.made.table.element);
    }
    if (show(c.loss, y.loss.length)) {
      c.loss.draw(y.step, [{ name: "training", values: gaps(y.loss), variable: "k-launch", text: lossText }, ...(y.held.length ? [{ name: "held-out", values: gaps(heldBySteps(y)), variable: "g1", text: lossText, points: true }] : [])], { text: (v) => trimmed(v.toFixed(4)), range: around });
    }
    if (show(c.speed, y.tokens_per_s.length)) c.speed.draw(y.step, [{ name: "tokens/s", values: gaps(y.tokens_per_s), variable: "g2", text: (v) => count(Math.round(v)), area: true }], { text: count, range: fromZero });
    if (show(c.time, y.ms.length)) c.time.draw(y.step, [{ name: "step", values: gaps(y.ms), variable: "g3", text: millis, area: true }], { text: (v) => v ? trimmed(millis(v)) : "0", range: fromZero });
    if (show(c.memory, y.device_peak.length)) {
      const host = most(y.host_peak) > 0;
      c.memory.draw(y.step, [{ name: "device", values: y.device_peak, variable: "k-launch", text: bytes, area: true }, ...(host ? [{ name: "host", values: y.host_peak, variable: "g2", text: bytes, dash: [5, 3] }] : [])], inBytes);
    }
    const spills = sum(y.spills), reruns = y.reruns.length ? y.reruns[y.reruns.length - 1] : 0;
    x.made.note.textContent = [spills ? plural(spills, "page") + " spilled to the host in all" : null, reruns ? plural(reruns, "step") + " rerun" : null].filter(Boolean).join("; ");
    x.made.table.draw();
  },
});
const stepsTable = () => {
  const y = theRun().steps, rows = y.step.map((_, i) => i), held = heldBySteps(y);
  const all = [["step", y.step, String], ["loss", y.loss, lossText], ["held-out", y.held.length ? held : [], (v) => v === null ? "–" : lossText(v)], ["tokens/s", y.tokens_per_s, (v) => count(Math.round(v))], ["time", y.ms, millis], ["device peak", y.device_peak, bytes], ["host peak", y.host_peak, bytes], ["spills", y.spills, count], ["reruns", y.reruns, count]];
  return table(all.filter(([, v]) => v.length).map(([name, v, text], j) => ({ name, n: j > 0, get: (i) => v[i] === undefined ? "–" : text(v[i]) })), rows);
};

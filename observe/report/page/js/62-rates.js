// Owns the bandwidth of copies over the run, averaged over each sample: offloads upwards,
// reloads downwards.


const drawRates = (plot, ctx) => {
  const { t, out, in: back } = state.data.rates, [from, to] = plot.view.range;
  const up = most(out) * 1.08, down = most(back) * 1.08, whole = Math.max(up + down, 1), room = plot.bottomAt - plot.top, zero = plot.top + room * up / whole;
  const y = (v) => zero - v / whole * room, step = steps125(Math.max(up, down), Math.max(room / 40 * Math.max(up, down) / whole, 3));
  plot.timeAxis(ctx);
  ctx.textAlign = "right";
  for (let v = -Math.floor(down / step) * step; v <= up; v += step) {
    const at = Math.round(y(v)) + 0.5;
    ctx.strokeStyle = paint.css("grid");
    ctx.beginPath();
    ctx.moveTo(plot.left, at);
    ctx.lineTo(plot.w - plot.right, at);
    ctx.stroke();
    ctx.fillStyle = paint.css("soft");
    ctx.fillText(Math.abs(v) < step / 2 ? "0" : rate(Math.abs(v)).replace(/\.0+ /, " "), plot.left - 6, at);
  }
  plot.clip(ctx, () => {
    for (const [values, sign, color] of [[out, 1, "g1"], [back, -1, "g2"]]) {
      const at = columns(t, values, from, to, plot.width), end = Math.min(plot.x(plot.view.all[1]), plot.w - plot.right);
      if (!at.length) continue;
      ctx.fillStyle = paint.css(color);
      ctx.beginPath();
      ctx.moveTo(plot.x(t[at[0]]), zero);
      at.forEach((i, k) => {
        const next = k + 1 < at.length ? plot.x(t[at[k + 1]]) : end;
        ctx.lineTo(plot.x(t[i]), y(sign * values[i]));
        ctx.lineTo(next, y(sign * values[i]));
      });
      ctx.lineTo(end, zero);
      ctx.fill();
    }
  });
  ctx.strokeStyle = paint.css("soft");
  ctx.beginPath();
  ctx.moveTo(plot.left, Math.round(zero) + 0.5);
  ctx.lineTo(plot.w - plot.right, Math.round(zero) + 0.5);
  ctx.stroke();
};
const rateAt = (t) => clamp(after(state.data.rates.t, t + 1e-9) - 1, 0, state.data.rates.t.length - 1);
const rateText = (t) => { const r = state.data.rates, i = rateAt(t); return "out " + rate(r.out[i]) + ", in " + rate(r.in[i]); };

const plotRates = new Plot({
  view: state.views.run, label: "Copy bandwidth over time", height: () => innerWidth < 700 ? 130 : 150,
  drawBase: drawRates,
  over(plot, ctx) {
    plot.clip(ctx, () => {
      plot.line(ctx, pinned(), paint.css("accent"));
      if (state.hover === null) return;
      plot.line(ctx, state.hover, paint.css("ink"), [3, 3]);
      plot.pill(ctx, rateText(state.hover), plot.x(state.hover), plot.top + 8, paint.css("ink"));
    });
  },
  move: (plot, x) => hover(plot.t(x)), leave: () => hover(null),
  pick: (plot, x) => { state.hover = null; pin(plot.t(x)); },
  key: (e) => {
    const go = (by) => () => { const { t } = state.data.rates; hover(t[clamp(rateAt(moment()) + by, 0, t.length - 1)]); say(millis(state.hover) + ": " + rateText(state.hover)); };
    return { ArrowLeft: go(-1), ArrowRight: go(1), Home: go(-Infinity), End: go(Infinity), Enter: () => { const t = moment(); state.hover = null; pin(t); toTensors(true); } }[e.key];
  },
});

// ratesTrack lies below the memory chart and shares its time axis.
const ratesTrack = () => {
  const each = h("li");
  const element = h("div", {}, h("div", { class: "track-head" }, h("h3", {}, "Copies between device and host"),
    h("ul", { class: "legend" }, h("li", {}, swatch("g1"), "offload (to the host)"), h("li", {}, swatch("g2"), "reload (to the device)"), each)), plotRates.element);
  return {
    element, table: alternative("bandwidth of copies", ratesTable),
    draw() {
      const there = most(state.data.rates.out) > 0 || most(state.data.rates.in) > 0;
      element.hidden = this.table.element.hidden = !there;
      each.textContent = averaged().slice(2);
      if (there) { plotRates.draw(true); this.table.draw(); }
    },
  };
};
// A single copy may be faster than the average over a sample.
const averaged = () => { const { each } = state.data.rates; return each ? ", averaged over " + millis(each) : ", averaged"; };
// One row for each step: the highest sample of each direction.
const ratesTable = () => {
  const { rates: r, steps } = state.data;
  const rows = steps.map((b) => {
    const i = Math.max(after(r.t, b.begin) - 1, 0), j = Math.max(after(r.t, b.end), i + 1);
    return { step: b.step, out: most(r.out.slice(i, j)), in: most(r.in.slice(i, j)) };
  });
  return table([{ name: "step", get: (x) => String(x.step) }, { name: "highest offload" + averaged(), n: true, get: (x) => rate(x.out) }, { name: "highest reload" + averaged(), n: true, get: (x) => rate(x.in) }], rows);
};

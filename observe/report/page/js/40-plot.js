// Owns charts over time on a canvas: sizes, axes, and zooming with wheel, drag, fingers
// and keys. A plot has a second canvas for what follows the pointer, so that pointing
// never redraws the chart.

const steps125 = (span, n) => {
  const raw = span / Math.max(n, 1), p = 10 ** Math.floor(Math.log10(raw)), m = raw / p;
  return (m <= 1 ? 1 : m <= 2 ? 2 : m <= 5 ? 5 : 10) * p;
};
// Ticks of bytes are powers of two apart. There are n to 2n of them.
const byteTicks = (top, n) => {
  const out = [], step = 2 ** Math.max(Math.floor(Math.log2(Math.max(top, 1) / n)), 0);
  for (let v = 0; v <= top * 1.0001; v += step) out.push(v);
  return out;
};
const timeText = (ms, step, top) => {
  const [v, d, unit] = top >= 2000 && step >= 10 ? [ms / 1000, step / 1000, "s"] : top >= 1 ? [ms, step, "ms"] : [ms * 1000, step * 1000, "µs"];
  return v.toFixed(clamp(Math.ceil(-Math.log10(d) - 1e-9), 0, 6)) + " " + unit;
};

class Plot {
  // options: view, label, height(), drawBase(plot, ctx) and
  // over(plot, ctx), move(plot, x, y) and leave() for the pointer, pick(plot, x, y) for
  // a click, key(event) for keys of its own: it gives what to do, or nothing; origin()
  // is where the axis begins to count.
  constructor(options) {
    Object.assign(this, { right: 12, top: 10, bottom: 22 }, options);
    this.base = h("canvas", { "aria-hidden": "true" });
    this.front = h("canvas", { class: "front", "aria-hidden": "true" });
    this.hint = h("span", { class: "hint", "aria-hidden": "true" }, "Ctrl + wheel zooms, or click the chart first");
    this.element = h("div", { class: "plot", tabindex: "0", role: options.role || "application", "aria-label": options.label, "aria-roledescription": options.description || "chart over time" },
      this.base, this.front, this.hint);
    this.fingers = new Map();
    this.listen();
    new ResizeObserver(() => { if (this.ready) this.draw(true); }).observe(this.element);
    this.view.drawn.add(() => { if (this.ready) this.draw(); });
  }
  // Charts that share a window of time share its place on the page.
  get left() { return 60; }
  get width() { return this.w - this.left - this.right; }
  get bottomAt() { return this.h - this.bottom; }
  x(t) { const [a, b] = this.view.range; return this.left + (t - a) / (b - a) * this.width; }
  t(x) { const [a, b] = this.view.range; return a + clamp((x - this.left) / this.width, 0, 1) * (b - a); }
  prepare(canvas) {
    const ratio = window.devicePixelRatio || 1, w = Math.round(this.w * ratio), height = Math.round(this.h * ratio);
    if (canvas.width !== w || canvas.height !== height) { canvas.width = w; canvas.height = height; }
    const ctx = canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, this.w, this.h);
    ctx.font = "11px " + paint.css("font");
    ctx.textBaseline = "middle";
    return ctx;
  }
  // Several changes within a frame are drawn once.
  draw(now) {
    this.ready = true;
    if (now) { this.paint(); return; }
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.paint(); });
  }
  paint() {
    this.w = this.element.clientWidth;
    if (!this.w) return;
    this.h = this.height();
    this.element.dataset.shown = this.view.range.map((t) => t.toFixed(3)).join(" ");
    this.element.style.height = this.h + "px";
    this.drawBase(this, this.prepare(this.base));
    this.follow();
  }
  follow() {
    if (!this.ready || !this.w) return;
    const ctx = this.prepare(this.front);
    this.over(this, ctx);
    if (this.selecting) {
      const [a, b] = this.selecting;
      ctx.fillStyle = paint.css("select");
      ctx.fillRect(Math.min(a, b), this.top, Math.abs(b - a), this.bottomAt - this.top);
    }
  }
  clip(ctx, draw) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(this.left, 0, this.width, this.h);
    ctx.clip();
    draw();
    ctx.restore();
  }
  line(ctx, t, color, dash) {
    const x = Math.round(this.x(t)) + 0.5;
    if (x < this.left - 1 || x > this.w - this.right + 1) return;
    ctx.save();
    ctx.strokeStyle = color;
    ctx.setLineDash(dash || []);
    ctx.beginPath();
    ctx.moveTo(x, this.top);
    ctx.lineTo(x, this.bottomAt);
    ctx.stroke();
    ctx.restore();
  }
  timeAxis(ctx) {
    const origin = this.origin ? this.origin() : 0, [a, b] = this.view.range.map((v) => v - origin), step = steps125(b - a, this.width / (this.w < 500 ? 70 : 110));
    ctx.fillStyle = paint.css("soft");
    ctx.strokeStyle = paint.css("grid");
    ctx.lineWidth = 1;
    ctx.textAlign = "center";
    for (let v = Math.ceil(a / step) * step; v <= b; v += step) {
      const x = Math.round(this.x(v + origin)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(x, this.bottomAt);
      ctx.lineTo(x, this.bottomAt + 4);
      ctx.stroke();
      const text = timeText(Math.abs(v) < step / 1e6 ? 0 : v, step, b), half = ctx.measureText(text).width / 2;
      ctx.fillText(text, clamp(x, half, this.w - half), this.bottomAt + 13);
    }
  }
  // pill is a label with a background of its own.
  pill(ctx, text, x, y, color, align) {
    const w = ctx.measureText(text).width + 10;
    const left = clamp(align === "right" ? x - w : align === "left" ? x : x - w / 2, this.left, Math.max(this.w - this.right - w, this.left));
    ctx.fillStyle = paint.css("panel");
    ctx.globalAlpha = 0.92;
    ctx.beginPath();
    ctx.roundRect(left, y - 9, w, 18, 4);
    ctx.fill();
    ctx.globalAlpha = 1;
    ctx.fillStyle = color;
    ctx.textAlign = "left";
    ctx.fillText(text, left + 5, y + 0.5);
  }
  at(event) {
    const box = this.element.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
  listen() {
    const el = this.element;
    el.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    el.addEventListener("pointerdown", (e) => this.down(e));
    el.addEventListener("pointermove", (e) => this.moved(e));
    for (const end of ["pointerup", "pointercancel"]) el.addEventListener(end, (e) => this.up(e, end === "pointerup"));
    el.addEventListener("pointerleave", () => { if (!this.fingers.size) this.leave(); });
    el.addEventListener("dblclick", () => this.view.reset());
    el.addEventListener("keydown", (e) => this.keys(e));
    el.addEventListener("blur", () => this.leave());
  }
  wheel(e) {
    const aside = Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey;
    if (aside) {
      if (!this.view.zoomed) return;
      e.preventDefault();
      this.view.pan((e.deltaX || e.deltaY) / this.width);
      return;
    }
    // The page scrolls under a chart unless the chart was clicked or Ctrl is held.
    if (!e.ctrlKey && !e.metaKey && document.activeElement !== this.element) {
      this.element.classList.add("hinted");
      clearTimeout(this.hinting);
      this.hinting = setTimeout(() => this.element.classList.remove("hinted"), 1200);
      return;
    }
    e.preventDefault();
    const [x] = this.at(e), perLine = e.deltaMode === 1 ? 16 : 1;
    this.view.zoom(Math.exp(clamp(e.deltaY * perLine, -120, 120) * (e.ctrlKey ? 0.008 : 0.003)), this.t(x));
  }
  down(e) {
    if (e.button > 0) return;
    const [x, y] = this.at(e);
    this.fingers.set(e.pointerId, { x, y });
    if (e.pointerType === "mouse") capture(this.element, e.pointerId);
    this.from = { x, y, moved: false, range: [...this.view.range] };
  }
  moved(e) {
    const [x, y] = this.at(e), finger = this.fingers.get(e.pointerId);
    if (this.fingers.size === 2 && finger) {
      this.pinch(e.pointerId, x);
      return;
    }
    if (finger && this.from) {
      if (Math.abs(x - this.from.x) > 4) this.from.moved = true;
      if (this.from.moved && (e.shiftKey || (e.pointerType !== "mouse" && this.view.zoomed))) {
        const [a, b] = this.from.range, d = (this.from.x - x) / this.width * (b - a);
        if (this.view.zoomed) this.view.set(a + d, b + d);
        return;
      }
      if (this.from.moved && e.pointerType === "mouse") this.selecting = [clamp(this.from.x, this.left, this.w - this.right), clamp(x, this.left, this.w - this.right)];
    }
    this.move(this, x, y);
    if (this.selecting) this.follow();
  }
  pinch(id, x) {
    const [other] = [...this.fingers].filter(([k]) => k !== id).map(([, f]) => f), mine = this.fingers.get(id);
    const before = Math.max(Math.abs(mine.x - other.x), 8), now = Math.max(Math.abs(x - other.x), 8);
    this.view.zoom(before / now, this.t(other.x));
    mine.x = x;
    if (this.from) this.from.moved = true;
  }
  up(e, done) {
    const [x, y] = this.at(e), mine = this.fingers.delete(e.pointerId);
    if (!mine || this.fingers.size) return;
    const { selecting, from } = this;
    this.selecting = null;
    if (done && selecting && Math.abs(selecting[1] - selecting[0]) > 6) {
      const [a, b] = selecting.map((v) => this.t(v)).sort((p, q) => p - q);
      this.view.set(a, b);
    } else if (done && from && !from.moved) this.pick(this, x, y);
    else this.follow();
    this.from = null;
  }
  keys(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const v = this.view;
    const act = {
      "+": () => v.zoom(0.6, this.centre()), "=": () => v.zoom(0.6, this.centre()), "-": () => v.zoom(1 / 0.6, this.centre()), "_": () => v.zoom(1 / 0.6, this.centre()),
      w: () => v.zoom(0.6, this.centre()), s: () => v.zoom(1 / 0.6, this.centre()), a: () => v.pan(-0.25), d: () => v.pan(0.25), 0: () => v.reset(),
    }[e.key] || (this.key && this.key(e));
    if (!act) return;
    e.preventDefault();
    e.stopPropagation();
    act();
  }
  // centre is what keys zoom around: the moment that is looked at, if it is in sight.
  centre() {
    const [a, b] = this.view.range, t = state.hover !== null ? state.hover : pinned();
    return t >= a && t <= b ? t : undefined;
  }
}
const capture = (el, id) => { try { el.setPointerCapture(id); } catch { /* the pointer may be gone */ } };

// The tip follows the pointer inside the window.
const tip = {
  show(x, y, ...children) {
    const el = $("tip");
    el.replaceChildren(...children);
    el.hidden = false;
    const w = el.offsetWidth, height = el.offsetHeight;
    el.style.left = clamp(x + 14 + w > innerWidth - 8 ? x - w - 14 : x + 14, 8, Math.max(innerWidth - w - 8, 8)) + "px";
    el.style.top = clamp(y + 18 + height > innerHeight - 8 ? y - height - 12 : y + 18, 8, Math.max(innerHeight - height - 8, 8)) + "px";
  },
  hide() { $("tip").hidden = true; },
};

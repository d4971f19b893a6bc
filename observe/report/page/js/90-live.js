// Owns the start, and the connection of a page that a run under way serves: it listens for
// events, fetches the report at most once a second, and redraws in place.

const live = {
  badge: h("span", { class: "live", role: "status", hidden: true }),
  show(text, kind) { this.badge.hidden = !text; this.badge.textContent = text; this.badge.className = "live " + (kind || ""); },
  asked: false, asking: false, last: 0, done: false, news: {},
  // words returns "live", and how far the run is once that is known.
  words() { return "live" + (this.news.left ? " · " + this.news.percent + " % · " + this.news.left + " left" : ""); },
  async ask() {
    if (this.asking) { this.asked = true; return; }
    this.asking = true;
    const wait = this.last + 1000 - Date.now();
    if (wait > 0) await new Promise((go) => setTimeout(go, wait));
    this.asked = false;
    this.last = Date.now();
    try {
      const answer = await fetch("report.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      await renew(tidy(await answer.json()));
      if (!this.done) this.show(state.report.live ? this.words() : "finished", state.report.live ? "on" : "off");
    } catch { this.show("no connection, retrying", "lost"); }
    this.asking = false;
    if (this.asked) this.ask();
  },
  listen() {
    const source = new EventSource("events");
    source.addEventListener("report", (e) => { this.news = JSON.parse(e.data); this.ask(); });
    source.addEventListener("done", () => { this.done = true; source.close(); this.show("finished", "off"); this.ask(); });
    source.addEventListener("open", () => { if (!this.done) { this.show(this.words(), "on"); this.ask(); } });
    source.addEventListener("error", () => {
      if (this.done) return;
      this.show("no connection, retrying", "lost");
      // The browser gives up after some errors; the page does not.
      if (source.readyState === EventSource.CLOSED) { source.close(); setTimeout(() => this.listen(), 1500); }
    });
  },
};

// renew takes a new report and keeps the selection: run and rank by name.
const renew = async (report) => {
  const first = !state.report, served = document.documentElement.hasAttribute("data-served");
  const old = first ? served && JSON.parse(keep.get(() => sessionStorage, "shown") || "null") : { run: theRun() && theRun().name, rank: theRun() && theRank() && theRank().rank, step: theDetail() && theDetail().step };
  state.report = report;
  state.loaded.clear();
  if (old) {
    state.run = Math.max(report.runs.findIndex((r) => r.name === old.run), 0);
    if (theRun()) state.rank = Math.max(theRun().ranks.findIndex((r) => r.rank === old.rank), 0);
  }
  if (first && !old) lookFirst();
  await settle();
  if (!state.data) return;
  if (first && old) {
    state.pin = typeof old.pin === "number" ? old.pin : null;
    Object.values(state.views).forEach((v, i) => { const [a, b] = list(old.views)[i] || []; if (typeof a === "number") v.set(a, b); });
  }
  const i = old ? state.data.details.findIndex((d) => d.step === old.step) : -1;
  if (i >= 0) { state.detail = i; spanStep(); } else showMoment(pinned());
  draw();
};

// drawn marks the page once it is drawn, for tests and measurements.
const drawn = () => requestAnimationFrame(() => requestAnimationFrame(() => { document.documentElement.dataset.ready = Math.round(performance.now()); }));
const start = async () => {
  if (document.documentElement.hasAttribute("data-served")) {
    $("about").textContent = "Waiting for the run …";
    await live.ask();
    drawn();
    if (!state.report || state.report.live) live.listen();
    return;
  }
  try { await renew(tidy(await decode($("report").textContent))); }
  catch (e) { $("about").textContent = "The data in this page cannot be read: " + e.message; return; }
  drawn();
};
if (document.readyState === "loading") addEventListener("DOMContentLoaded", start); else start();

// Owns the bar at the top: sections, run and rank, theme, help, and the keys of the page.

const THEMES = [["auto", "◐", "Theme: follow the system"], ["light", "☀", "Theme: light"], ["dark", "☾", "Theme: dark"]];
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = {
  now: keep.get(() => localStorage, "theme") || "auto",
  set(name) {
    this.now = THEMES.some(([x]) => x === name) ? name : "auto";
    keep.set(() => localStorage, "theme", this.now);
    const t = THEMES.find(([x]) => x === this.now);
    if (this.button) { this.button.textContent = t[1]; this.button.setAttribute("aria-label", t[2]); this.button.title = t[2] + " (t)"; }
    this.apply(this.now === "auto" ? dark.matches ? "dark" : "light" : this.now);
  },
  apply(look) {
    document.documentElement.dataset.theme = look;
    paint.forget();
    if (state.report) draw();
  },
  next() { this.set(THEMES[(THEMES.findIndex(([x]) => x === this.now) + 1) % THEMES.length][0]); say(THEMES.find(([x]) => x === this.now)[2]); },
};
theme.set(theme.now);
dark.addEventListener("change", () => theme.set(theme.now));
// Pages are printed in the light theme.
addEventListener("beforeprint", () => { for (const x of state.sections) x.near = true; theme.apply("light"); });
addEventListener("afterprint", () => theme.set(theme.now));

const picker = (id, label, options, value, choose) => h("label", { class: "picker" }, h("span", {}, label), h("select", { id, onchange: (e) => choose(+e.target.value) },
  options.map((name, i) => h("option", { value: String(i), selected: i === value }, name))));

const drawBar = () => {
  const { report } = state, run = theRun();
  if (!theme.button) {
    theme.button = h("button", { type: "button", class: "icon", id: "theme", onclick: () => theme.next() });
    theme.help = h("button", { type: "button", class: "icon", id: "ask", title: "Help (?)", "aria-label": "Help: the keys of this page", onclick: () => help(true) }, "?");
    const t = THEMES.find(([x]) => x === theme.now);
    fill(theme.button, { "aria-label": t[2], title: t[2] + " (t)" }, [t[1]]);
  }
  const had = document.activeElement && document.activeElement.id, parts = [];
  if (report.runs.length > 1) parts.push(picker("pick-run", "Run", report.runs.map((r, i) => r.name || "run " + (i + 1)), state.run, (i) => choose(i)));
  if (run && run.ranks.length > 1) parts.push(picker("pick-rank", "Rank", run.ranks.map((r) => String(r.rank)), state.rank, (i) => choose(undefined, i)));
  $("picks").replaceChildren(live.badge, ...parts, theme.button, theme.help);
  if (had && $(had) && document.activeElement !== $(had)) $(had).focus();
  const shown = state.sections.filter((x) => !x.element.hidden), names = shown.map((x) => x.id).join();
  if (theme.names === names) return;
  theme.names = names;
  $("nav").replaceChildren(...[{ id: "overview", name: "Overview" }, ...shown].map((x) => h("a", { href: "#" + x.id }, x.name)));
  spy();
};
// spy marks the section in view in the navigation.
const spy = () => {
  const links = [...$("nav").querySelectorAll("a")];
  let now = links[0];
  for (const a of links) { const el = $(a.hash.slice(1)); if (el && el.getBoundingClientRect().top < 140) now = a; }
  if (scrollY > 0 && scrollY + innerHeight >= document.documentElement.scrollHeight - 4) now = links[links.length - 1];
  for (const a of links) {
    if ((a === now) === a.hasAttribute("aria-current")) continue;
    if (a === now) {
      a.setAttribute("aria-current", "true");
      const nav = $("nav");
      if (nav.scrollWidth > nav.clientWidth) nav.scrollLeft = a.offsetLeft - nav.clientWidth / 3;
    } else a.removeAttribute("aria-current");
  }
};
let spying = false;
addEventListener("scroll", () => {
  tip.hide();
  if (spying) return;
  spying = true;
  requestAnimationFrame(() => { spying = false; spy(); });
}, { passive: true });

const KEYS = [
  ["The page", [["?", "this help"], ["t", "theme: system, light, dark"], ["r  R", "next, previous rank"], ["]  [", "next, previous run"], ["n", "next detailed step"], ["p", "back to the peak"], ["m", "to the memory chart"], ["g", "to the streams"]]],
  ["A chart that has the focus", [["← →", "previous and next moment or span"], ["↑ ↓", "previous and next stream"], ["Home End", "first and last"], ["Enter", "pin the moment and list its tensors"], ["Esc", "back to the peak"], ["+ −  or  w s", "zoom in and out"], ["a d", "move left and right"], ["f", "zoom to the span"], ["0", "zoom out fully"]]],
  ["Mouse and fingers", [["click", "pin the moment"], ["drag", "zoom in"], ["Shift + drag", "move"], ["Ctrl + wheel", "zoom (without Ctrl after a click on the chart)"], ["double-click", "zoom out fully"], ["two fingers", "zoom and move"]]],
];
const help = (open) => {
  const el = $("help");
  if (!open) { el.close(); return; }
  if (!el.childElementCount) {
    el.append(h("div", { class: "head" }, h("h2", { id: "help-title" }, "Keys"), h("button", { type: "button", class: "icon", "aria-label": "Close", onclick: () => help(false) }, "✕")),
      h("div", { class: "keys" }, KEYS.map(([title, rows]) => h("section", {}, h("h3", {}, title), h("dl", {}, rows.map(([key, what]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, what))))))),
      h("p", { class: "soft small" }, "Below each chart is a table of its data. Sizes are binary (1 GiB = 1024 MiB) and rates are decimal (1 GB/s = 10⁹ bytes a second)."));
    el.addEventListener("click", (e) => { if (e.target === el) el.close(); });
  }
  el.showModal();
};

addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.defaultPrevented || !state.report) return;
  if (e.target instanceof Element && e.target.closest("input, select, textarea, dialog[open]")) return;
  const go = (id, plot) => () => {
    // Draw the section before the next key arrives.
    state.sections.find((x) => x.id === id).near = true;
    drawSeen();
    $(id).scrollIntoView({ behavior: calm() ? "auto" : "smooth" }); plot.element.focus({ preventScroll: true });
  };
  const act = {
    "?": () => help(true), t: () => theme.next(), r: () => choose(undefined, state.rank + 1), R: () => choose(undefined, state.rank - 1), "]": () => choose(state.run + 1), "[": () => choose(state.run - 1),
    n: () => chooseDetail(state.detail + 1), p: () => { if (state.data) goToPeak(); }, m: go("memory", plotMemory), g: go("streams", plotStreams),
  }[e.key];
  if (!act) return;
  e.preventDefault();
  act();
});

// Owns the theme button and the cursor of the timeline. Everything else works without
// this script, and without it the system chooses the theme.
"use strict";
(() => {
  const themes = [["auto", "◐", "Theme: as the system"], ["light", "☀", "Theme: light"], ["dark", "☾", "Theme: dark"]];
  const button = document.getElementById("theme");
  let now = 0;
  const set = (i) => {
    now = Math.max(i, 0) % themes.length;
    const [name, sign, label] = themes[now];
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = sign;
    button.title = label;
    button.setAttribute("aria-label", label);
    try { localStorage.setItem("theme", name); } catch { /* a browser may forbid storage; the choice then ends with the page */ }
  };
  let kept = "auto";
  try { kept = localStorage.getItem("theme") || kept; } catch { /* as above */ }
  button.addEventListener("click", () => set(now + 1));
  button.hidden = false;
  set(themes.findIndex(([name]) => name === kept));
})();
// The cursor follows the pointer, and the arrow keys while the chart has the focus.
(() => {
  const chart = document.getElementById("chart");
  if (!chart) return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const cursor = chart.querySelector(".cursor");
  const readout = document.getElementById("readout");
  const last = data.passes.length - 1;
  const size = (mib) => mib >= 1024 ? (mib / 1024).toFixed(2) + " GiB" : mib.toFixed(1) + " MiB";
  let at = data.peak;

  const show = (i) => {
    at = Math.min(Math.max(i, 0), last);
    const values = data.values[at];
    const head = "pass " + (at + 1) + " of " + (last + 1) + ", " + data.passes[at] + ": " +
      size(values.reduce((a, b) => a + b, 0)) + (at === data.peak ? ", the peak" : "");
    cursor.hidden = false;
    cursor.style.left = 100 * (at + 0.5) / (last + 1) + "%";
    chart.setAttribute("aria-valuenow", at + 1);
    chart.setAttribute("aria-valuetext", head);
    const strong = document.createElement("strong");
    strong.textContent = head;
    const parts = data.names.map((name, j) => {
      const span = document.createElement("span");
      span.textContent = name + " " + size(values[j]);
      return span;
    }).filter((_, j) => values[j] > 0);
    readout.replaceChildren(strong, ...parts);
  };

  const move = (e) => {
    const box = chart.getBoundingClientRect();
    show(Math.floor((e.clientX - box.left) / box.width * (last + 1)));
  };
  chart.addEventListener("pointermove", move);
  chart.addEventListener("pointerdown", move);
  chart.addEventListener("keydown", (e) => {
    const to = {
      ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - 1, ArrowUp: at + 1,
      PageDown: at - 16, PageUp: at + 16, Home: 0, End: last, p: data.peak,
    }[e.key];
    if (to === undefined || e.ctrlKey || e.altKey || e.metaKey) return;
    e.preventDefault();
    show(to);
  });
  show(at);
})();

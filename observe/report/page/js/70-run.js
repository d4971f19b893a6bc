// Owns how the run was made: its command, environment and options, and all figures of
// summary.json.

const copyButton = (text) => {
  const button = h("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text()); button.textContent = "Copied"; }
    catch {
      // A file may not be allowed to use the clipboard: select the text for Ctrl+C.
      const pre = button.parentElement.querySelector("pre"), range = document.createRange();
      range.selectNodeContents(pre);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      let done = false;
      try { done = document.execCommand("copy"); } catch { done = false; }
      button.textContent = done ? "Copied" : "Press Ctrl+C";
    }
    say(button.textContent);
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
};
const snippet = (text, label) => h("div", { class: "snippet" }, h("pre", { tabindex: "0", "aria-label": label }, text), copyButton(() => text));

section({
  id: "run", name: "Setup", title: "How to reproduce this run",
  there: () => !!theRun(),
  draw(x) {
    const run = theRun(), env = Object.entries(run.environment).sort(([a], [b]) => a < b ? -1 : 1);
    const open = x.body.querySelector("details.options") && x.body.querySelector("details.options").open;
    const figures = x.figures = x.figures || alternative("all figures of this run in summary.json", () => table([
      { name: "figure", get: (f) => f.label || f.name }, { name: "key", get: (f) => h("code", {}, f.name) }, { name: "value", n: true, get: (f) => h("span", { class: f.unit === "text" ? "break" : "" }, figure(f)) },
      { name: "exact value", n: true, get: (f) => f.unit === "text" ? "" : String(f.value) }], theRun().figures));
    x.body.replaceChildren(run.command ? snippet(run.command, "Command") : "",
      env.length ? h("dl", { class: "facts" }, env.map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, String(v))))) : "",
      run.options ? h("details", { class: "options", open }, h("summary", {}, "Options (config.yaml)"), snippet(run.options, "Options")) : "", figures.element);
    figures.draw();
  },
});

// This file tests the page in a browser.

package planview

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/browser"
)

var shots = flag.String("shots", "", "write pictures of the page into this `folder`")

// SPEC S6.5: the page works from a file, in both themes, at the widths of a desk
// and of a telephone, by keyboard alone, and sends no request.
func TestPageInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a browser")
	}
	b := browser.Start(t)
	file := filepath.Join(t.TempDir(), "plan.html")
	var page bytes.Buffer
	if err := sample().WritePage(&page); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, page.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	url := "file://" + file
	open := func(width int, theme string) {
		b.Window(width, theme)
		b.Forget()
		b.Open(url)
	}
	picture := func(name string) {
		if *shots != "" {
			b.Picture(*shots, name)
		}
	}
	for _, theme := range []string{"light", "dark"} {
		for _, width := range []int{1440, 390} {
			open(width, theme)
			name := fmt.Sprintf("plan-%s-%d", theme, width)
			if got := browser.Eval[int](b, "document.documentElement.scrollWidth"); got > width {
				t.Errorf("%s: the page is %d wide and scrolls sideways", name, got)
			}
			picture(name)
			tryKeyboard(t, b, name)
			picture(name + "-open")
			if c := b.Complaints(url); len(c) > 0 {
				t.Errorf("%s: %s", name, strings.Join(c, "\n"))
			}
		}
	}
	dark, light := browser.Eval[string](b, "getComputedStyle(document.body).backgroundColor"), ""
	open(1440, "light")
	if light = browser.Eval[string](b, "getComputedStyle(document.body).backgroundColor"); light == dark {
		t.Errorf("both themes have the background %s", light)
	}

	// The button goes through the system's theme, the light one and the dark one.
	for _, want := range []string{"light", "dark", ""} {
		browser.Eval[bool](b, `(() => { document.getElementById("theme").click(); return true })()`)
		got := browser.Eval[string](b, `document.documentElement.dataset.theme || ""`)
		color := browser.Eval[string](b, "getComputedStyle(document.body).backgroundColor")
		if got != want || (color == dark) != (want == "dark") {
			t.Errorf("the theme is %q with the background %s, want %q", got, color, want)
		}
	}

	// The watch itself must see: a request and an error are planted.
	b.Forget()
	browser.Eval[bool](b, `(() => { const i = new Image(); i.src = "http://127.0.0.1:1/x.png"; console.error("planted"); return true })()`)
	if c := strings.Join(b.Complaints(url), " "); !strings.Contains(c, "planted") {
		t.Errorf("a planted error was not seen: %s", c)
	}
}

// tryKeyboard opens the first rank and moves the cursor with keys alone.
func tryKeyboard(t *testing.T, b *browser.Tab, name string) {
	t.Helper()
	for range 40 {
		b.Press("Tab")
		if browser.Eval[string](b, "document.activeElement.id") == "chart" {
			break
		}
		if browser.Eval[bool](b, `document.activeElement === document.querySelector("details summary")`) {
			b.Press("Enter")
		}
	}
	if !browser.Eval[bool](b, `document.querySelector("details").open`) {
		t.Errorf("%s: the first rank cannot be opened", name)
	}
	if browser.Eval[string](b, "document.activeElement.id") != "chart" {
		t.Fatalf("%s: the timeline cannot be reached with Tab", name)
	}
	at := func() int {
		return browser.Eval[int](b, `+document.getElementById("chart").getAttribute("aria-valuenow")`)
	}
	peak := at()
	if peak != makeTimeline(sample()).Peak+1 {
		t.Errorf("%s: the cursor begins at %d and not at the peak", name, peak)
	}
	b.Press("ArrowRight")
	if at() != peak+1 {
		t.Errorf("%s: the right arrow went from %d to %d", name, peak, at())
	}
	b.Press("End")
	b.Press("ArrowRight")
	if n := browser.Eval[int](b, `+document.getElementById("chart").getAttribute("aria-valuemax")`); at() != n {
		t.Errorf("%s: the last pass is %d, not %d", name, n, at())
	}
	b.Press("Home")
	if text := browser.Eval[string](b, `document.getElementById("readout").textContent`); at() != 1 || !strings.Contains(text, "pass 1 of") {
		t.Errorf("%s: after Home the cursor is at %d, %q", name, at(), text)
	}
}

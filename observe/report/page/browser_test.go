// This file owns what the tests of the page do in a browser.

package page

import (
	"flag"
	"fmt"
	"testing"

	driver "github.com/stowage-dev/stowage/internal/browser"
)

var shots = flag.String("shots", "", "write pictures of the page into this `folder`")

// browser is a tab with a report.
type browser struct{ *driver.Tab }

func startBrowser(t *testing.T) *browser {
	t.Helper()
	return &browser{driver.Start(t)}
}

// open goes to an address and waits until the page is drawn.
func (b *browser) open(url string) {
	b.T.Helper()
	b.Forget()
	b.Open(url)
	b.Until("document.documentElement.dataset.ready")
}

func eval[T any](b *browser, expression string) T {
	b.T.Helper()
	return driver.Eval[T](b.Tab, expression)
}

// mouse moves, or with buttons presses and lets go, at a share of an element's box.
func (b *browser) mouse(kind, selector string, x, y float64) {
	b.T.Helper()
	box := eval[[]float64](b, fmt.Sprintf("(() => { const r = document.querySelector(%q).getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; })()", selector))
	event := map[string]any{"type": kind, "x": box[0] + x*box[2], "y": box[1] + y*box[3]}
	if kind != "mouseMoved" {
		event["button"], event["clickCount"] = "left", 1
	}
	b.Do(nil, "Input.dispatchMouseEvent", event)
}

func (b *browser) click(selector string, x, y float64) {
	b.T.Helper()
	for _, kind := range []string{"mouseMoved", "mousePressed", "mouseReleased"} {
		b.mouse(kind, selector, x, y)
	}
}

// frame lets the page draw.
func (b *browser) frame() {
	b.T.Helper()
	eval[bool](b, "new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(() => go(true))))")
}

func (b *browser) text(selector string) string {
	b.T.Helper()
	return eval[string](b, fmt.Sprintf("document.querySelector(%q).textContent", selector))
}

// picture writes what is seen, if somebody wants pictures.
func (b *browser) picture(name string) {
	b.T.Helper()
	if *shots != "" {
		b.Picture(*shots, name)
	}
}

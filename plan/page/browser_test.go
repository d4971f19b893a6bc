// This file tests the page in a browser, which it drives through its debugging
// pipe: messages of JSON that end in a zero byte, on file descriptors 3 and 4.

package page

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var shots = flag.String("shots", "", "write pictures of the page into this `folder`")

// browser is a Chromium with one tab. Every command waits for its answer; what
// the browser reports meanwhile is kept.
type browser struct {
	t       *testing.T
	in      io.Writer
	out     *bufio.Reader
	next    int
	session string
	events  []message
}

type message struct {
	ID     int             `json:"id,omitempty"`
	Method string          `json:"method,omitempty"`
	Params json.RawMessage `json:"params,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
	Error  json.RawMessage `json:"error,omitempty"`
}

// startBrowser skips the test where there is no Chromium.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	var path string
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if p, err := exec.LookPath(name); err == nil {
			path = p
			break
		}
	}
	if path == "" {
		t.Skip("no Chromium is installed (on Debian: apt install chromium), so the page is not opened")
	}
	theirIn, ourIn, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ourOut, theirOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--no-first-run",
		"--user-data-dir="+t.TempDir(), "--remote-debugging-pipe")
	cmd.ExtraFiles = []*os.File{theirIn, theirOut}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirIn.Close()
	theirOut.Close()
	// A browser that hangs must not hang the tests.
	deadline := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	b := &browser{t: t, in: ourIn, out: bufio.NewReaderSize(ourOut, 1<<20)}
	t.Cleanup(func() {
		_, _ = fmt.Fprint(ourIn, `{"id":999999,"method":"Browser.close"}`+"\x00")
		_, _ = io.Copy(io.Discard, b.out)
		deadline.Stop()
		_ = cmd.Wait()
		ourIn.Close()
		ourOut.Close()
		if t.Failed() {
			t.Logf("the browser said %s", errs.String())
		}
	})
	var target struct{ TargetID, SessionID string }
	b.do(&target, "Target.createTarget", map[string]any{"url": "about:blank"})
	b.do(&target, "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true})
	b.session = target.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		b.do(nil, domain+".enable", nil)
	}
	return b
}

// do sends a command and reads its result.
func (b *browser) do(result any, method string, params map[string]any) {
	b.t.Helper()
	b.next++
	text, err := json.Marshal(struct {
		ID      int            `json:"id"`
		Method  string         `json:"method"`
		Params  map[string]any `json:"params,omitempty"`
		Session string         `json:"sessionId,omitempty"`
	}{b.next, method, params, b.session})
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.in.Write(append(text, 0)); err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
	m := b.read(func(m message) bool { return m.ID == b.next })
	if m.Error != nil {
		b.t.Fatalf("%s: %s", method, m.Error)
	}
	if result != nil {
		if err := json.Unmarshal(m.Result, result); err != nil {
			b.t.Fatalf("%s: %v", method, err)
		}
	}
}

// read takes messages up to one that is wanted; events are kept.
func (b *browser) read(wanted func(message) bool) message {
	b.t.Helper()
	for {
		text, err := b.out.ReadBytes(0)
		if err != nil {
			b.t.Fatalf("the browser went away: %v", err)
		}
		var m message
		if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
			b.t.Fatal(err)
		}
		if m.Method != "" {
			b.events = append(b.events, m)
		}
		if wanted(m) {
			return m
		}
	}
}

// open shows a file at a width in a theme, and waits until it is there.
func (b *browser) open(file string, width int, theme string) {
	b.t.Helper()
	b.do(nil, "Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700})
	b.do(nil, "Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": theme}}})
	b.events = nil
	b.do(nil, "Page.navigate", map[string]any{"url": "file://" + file})
	for _, e := range b.events {
		if e.Method == "Page.loadEventFired" {
			return
		}
	}
	b.read(func(m message) bool { return m.Method == "Page.loadEventFired" })
}

// eval evaluates an expression on the page.
func eval[T any](b *browser, expression string) T {
	b.t.Helper()
	var r struct {
		Result    struct{ Value T }
		Exception json.RawMessage `json:"exceptionDetails"`
	}
	b.do(&r, "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true})
	if r.Exception != nil {
		b.t.Fatalf("%s: %s", expression, r.Exception)
	}
	return r.Result.Value
}

// press types a key.
func (b *browser) press(key string, code int) {
	b.t.Helper()
	for _, kind := range []string{"keyDown", "keyUp"} {
		event := map[string]any{"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
		if key == "Enter" {
			event["text"] = "\r" // a key acts by its character
		}
		b.do(nil, "Input.dispatchKeyEvent", event)
	}
}

// picture writes what is seen, the whole page.
func (b *browser) picture(name string) {
	b.t.Helper()
	if *shots == "" {
		return
	}
	var r struct{ Data string }
	b.do(&r, "Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true})
	png, err := base64.StdEncoding.DecodeString(r.Data)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(*shots, name+".png"), png, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// complaints are what the page did wrong: console messages, exceptions, and
// requests beyond the file itself.
func (b *browser) complaints(file string) (out []string) {
	for _, e := range b.events {
		switch e.Method {
		case "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded":
			out = append(out, e.Method+" "+string(e.Params))
		case "Network.requestWillBeSent":
			if !strings.Contains(string(e.Params), `"url":"file://`+file+`"`) {
				out = append(out, "a request: "+string(e.Params))
			}
		}
	}
	return out
}

// SPEC S6.5: the page works from a file, in both themes, at the widths of a desk
// and of a telephone, by keyboard alone, and sends no request.
func TestPageInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a browser")
	}
	b := startBrowser(t)
	file := filepath.Join(t.TempDir(), "plan.html")
	var page bytes.Buffer
	if err := Write(&page, sample()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, page.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, theme := range []string{"light", "dark"} {
		for _, width := range []int{1440, 390} {
			b.open(file, width, theme)
			name := fmt.Sprintf("plan-%s-%d", theme, width)
			if got := eval[int](b, "document.documentElement.scrollWidth"); got > width {
				t.Errorf("%s: the page is %d wide and scrolls sideways", name, got)
			}
			b.picture(name)
			tryKeyboard(t, b, name)
			b.picture(name + "-open")
			if c := b.complaints(file); len(c) > 0 {
				t.Errorf("%s: %s", name, strings.Join(c, "\n"))
			}
		}
	}
	dark, light := eval[string](b, "getComputedStyle(document.body).backgroundColor"), ""
	b.open(file, 1440, "light")
	if light = eval[string](b, "getComputedStyle(document.body).backgroundColor"); light == dark {
		t.Errorf("both themes have the background %s", light)
	}

	// The watch itself must see: a request and an error are planted.
	b.events = nil
	eval[bool](b, `(() => { const i = new Image(); i.src = "http://127.0.0.1:1/x.png"; console.error("planted"); return true })()`)
	if c := strings.Join(b.complaints(file), " "); !strings.Contains(c, "planted") {
		t.Errorf("a planted error was not seen: %s", c)
	}
}

// tryKeyboard opens the first rank and moves the cursor with keys alone.
func tryKeyboard(t *testing.T, b *browser, name string) {
	t.Helper()
	for range 40 {
		b.press("Tab", 9)
		if eval[string](b, "document.activeElement.id") == "chart" {
			break
		}
		if eval[bool](b, `document.activeElement === document.querySelector("details summary")`) {
			b.press("Enter", 13)
		}
	}
	if !eval[bool](b, `document.querySelector("details").open`) {
		t.Errorf("%s: the first rank cannot be opened", name)
	}
	if eval[string](b, "document.activeElement.id") != "chart" {
		t.Fatalf("%s: the timeline cannot be reached with Tab", name)
	}
	at := func() int { return eval[int](b, `+document.getElementById("chart").getAttribute("aria-valuenow")`) }
	peak := at()
	if peak != makeTimeline(sample()).Peak+1 {
		t.Errorf("%s: the cursor begins at %d and not at the peak", name, peak)
	}
	b.press("ArrowRight", 39)
	if at() != peak+1 {
		t.Errorf("%s: the right arrow went from %d to %d", name, peak, at())
	}
	b.press("End", 35)
	b.press("ArrowRight", 39)
	if n := eval[int](b, `+document.getElementById("chart").getAttribute("aria-valuemax")`); at() != n {
		t.Errorf("%s: the last pass is %d, not %d", name, n, at())
	}
	b.press("Home", 36)
	if text := eval[string](b, `document.getElementById("readout").textContent`); at() != 1 || !strings.Contains(text, "pass 1 of") {
		t.Errorf("%s: after Home the cursor is at %d, %q", name, at(), text)
	}
}

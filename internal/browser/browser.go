// Package browser drives a headless Chromium for tests of pages. It talks to Chromium's
// debugging pipe: JSON messages that end in a zero byte, on file descriptors 3 and 4.
// Only tests import it.
package browser

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Tab is a tab of a browser. Each command waits for its answer and keeps the events that
// arrive meanwhile. All tabs of a browser belong to one goroutine.
type Tab struct {
	*pipe
	session string
}

// pipe is the connection that all tabs of a browser share.
type pipe struct {
	T      *testing.T
	in     io.Writer
	out    *bufio.Reader
	sent   int
	events []message
}

type message struct {
	ID     int             `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  json.RawMessage `json:"error"`
}

// Find returns the path of a Chromium. It skips the test if there is none.
func Find(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Skip("no Chromium is installed (on Debian: apt install chromium), so the page is not opened")
	return ""
}

// Start starts a browser and returns its first tab. The browser ends with the test.
func Start(t *testing.T) *Tab {
	t.Helper()
	path := Find(t)
	theirIn, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--no-first-run",
		"--user-data-dir="+t.TempDir(), "--remote-debugging-pipe")
	var errs bytes.Buffer
	cmd.ExtraFiles, cmd.Stderr, cmd.WaitDelay = []*os.File{theirIn, theirOut}, &errs, 10*time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirIn.Close()
	theirOut.Close()
	// A browser that hangs must not hang the tests.
	deadline := time.AfterFunc(8*time.Minute, func() { _ = cmd.Process.Kill() })
	p := &pipe{T: t, in: in, out: bufio.NewReaderSize(out, 1<<20)}
	t.Cleanup(func() {
		_, _ = fmt.Fprint(in, `{"id":999999,"method":"Browser.close"}`+"\x00")
		_, _ = io.Copy(io.Discard, p.out)
		deadline.Stop()
		_ = cmd.Wait()
		in.Close()
		out.Close()
		if t.Failed() {
			t.Logf("the browser wrote %s", errs.String())
		}
	})
	return (&Tab{pipe: p}).Another()
}

// Another opens another tab of the same browser.
func (b *Tab) Another() *Tab {
	b.T.Helper()
	tab := &Tab{pipe: b.pipe}
	var target struct{ TargetID, SessionID string }
	tab.Do(&target, "Target.createTarget", map[string]any{"url": "about:blank"})
	tab.Do(&target, "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true})
	tab.session = target.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		tab.Do(nil, domain+".enable", nil)
	}
	return tab
}

// Do sends a command and decodes its answer into result, unless that is nil.
func (b *Tab) Do(result any, method string, params map[string]any) {
	b.T.Helper()
	b.sent++
	text, err := json.Marshal(struct {
		ID      int            `json:"id"`
		Method  string         `json:"method"`
		Params  map[string]any `json:"params,omitempty"`
		Session string         `json:"sessionId,omitempty"`
	}{b.sent, method, params, b.session})
	if err != nil {
		b.T.Fatal(err)
	}
	if _, err := b.in.Write(append(text, 0)); err != nil {
		b.T.Fatalf("%s: %v", method, err)
	}
	m := b.answer()
	if m.Error != nil {
		b.T.Fatalf("%s: %s", method, m.Error)
	}
	if result != nil {
		if err := json.Unmarshal(m.Result, result); err != nil {
			b.T.Fatalf("%s: %v", method, err)
		}
	}
}

// answer reads messages up to the answer to the last command. It keeps events.
func (b *Tab) answer() message {
	b.T.Helper()
	for {
		text, err := b.out.ReadBytes(0)
		if err != nil {
			b.T.Fatalf("cannot read from the browser: %v", err)
		}
		var m message
		if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
			b.T.Fatal(err)
		}
		if m.Method != "" {
			b.events = append(b.events, m)
		}
		if m.ID == b.sent {
			return m
		}
	}
}

// Window sets the width of the window and the preferred theme, "light" or "dark".
func (b *Tab) Window(width int, theme string) {
	b.T.Helper()
	b.Do(nil, "Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700})
	b.Do(nil, "Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{
		{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": "reduce"},
	}})
}

// Open loads an address and waits until it is complete.
func (b *Tab) Open(url string) {
	b.T.Helper()
	// The old page may have the same address.
	Eval[bool](b, "window.left = true")
	b.Do(nil, "Page.navigate", map[string]any{"url": url})
	b.Until(`!window.left && document.readyState === "complete"`)
}

// Until waits until an expression is true on the page. It fails the test after
// five minutes.
func (b *Tab) Until(expression string) {
	b.T.Helper()
	for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if Eval[bool](b, "!!("+expression+")") {
			return
		}
	}
	b.T.Fatalf("expected %s to become true; the page shows %.500q and complains of %q", expression, Eval[string](b, "document.body.innerText"), b.Complaints())
}

// Eval evaluates an expression on the page and returns its value.
func Eval[T any](b *Tab, expression string) T {
	b.T.Helper()
	var r struct {
		Result    struct{ Value T }
		Exception json.RawMessage `json:"exceptionDetails"`
	}
	b.Do(&r, "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true})
	if r.Exception != nil {
		b.T.Fatalf("%s: %s", expression, r.Exception)
	}
	return r.Result.Value
}

var codes = map[string]int{"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "Tab": 9}

// Press types keys: single characters, or names such as "Enter".
func (b *Tab) Press(keys ...string) {
	b.T.Helper()
	for _, key := range keys {
		for _, kind := range []string{"keyDown", "keyUp"} {
			event := map[string]any{"type": kind, "key": key, "windowsVirtualKeyCode": codes[key]}
			if key == "Enter" {
				event["text"] = "\r" // the page reacts to the character
			} else if codes[key] == 0 {
				event["text"] = key
			}
			b.Do(nil, "Input.dispatchKeyEvent", event)
		}
	}
}

// Picture writes a screenshot of the whole page into a folder, as name.png.
func (b *Tab) Picture(folder, name string) {
	b.T.Helper()
	// Sections are drawn when they come near the window: scroll through all of them.
	Eval[bool](b, "(async () => { for (let y = 0; y < document.body.scrollHeight; y += 600) { scrollTo(0, y); await new Promise((go) => setTimeout(go, 40)); } scrollTo(0, 0); await new Promise((go) => setTimeout(go, 60)); return true; })()")
	var r struct{ Data string }
	b.Do(&r, "Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true})
	png, err := base64.StdEncoding.DecodeString(r.Data)
	if err != nil {
		b.T.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, name+".png"), png, 0o644); err != nil {
		b.T.Fatal(err)
	}
}

// Forget drops the events so far.
func (b *Tab) Forget() { b.events = nil }

// Complaints returns what pages did wrong: console messages, exceptions, and requests to
// addresses that are not allowed.
func (b *Tab) Complaints(allowed ...string) (out []string) {
	for _, e := range b.events {
		switch e.Method {
		case "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded":
			out = append(out, e.Method+" "+string(e.Params))
		case "Network.requestWillBeSent":
			var p struct{ Request struct{ URL string } }
			_ = json.Unmarshal(e.Params, &p)
			url, _, _ := strings.Cut(p.Request.URL, "#")
			if !slices.Contains(allowed, url) && !strings.HasPrefix(url, "data:image/svg+xml") && !strings.HasPrefix(url, "blob:") {
				out = append(out, "unexpected request: "+p.Request.URL)
			}
		}
	}
	return out
}

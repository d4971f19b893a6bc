// Package browser drives a Chromium without a window, for tests of pages: through its
// debugging pipe, by messages of JSON that end in a zero byte, on file descriptors 3
// and 4. Only tests import it.
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

// Tab is one of a browser's. Every command waits for its answer; what the browser
// reports meanwhile is kept. All tabs of a browser are one goroutine's.
type Tab struct {
	*pipe
	session string
}

// pipe is what all tabs share.
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

// Find finds a Chromium, and skips the test where there is none.
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

// Start starts a browser with one tab, which ends with the test.
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
	deadline := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
	p := &pipe{T: t, in: in, out: bufio.NewReaderSize(out, 1<<20)}
	t.Cleanup(func() {
		_, _ = fmt.Fprint(in, `{"id":999999,"method":"Browser.close"}`+"\x00")
		_, _ = io.Copy(io.Discard, p.out)
		deadline.Stop()
		_ = cmd.Wait()
		in.Close()
		out.Close()
		if t.Failed() {
			t.Logf("the browser said %s", errs.String())
		}
	})
	return (&Tab{pipe: p}).Another()
}

// Another is another tab of the same browser.
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

// Do sends a command and reads its result.
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

// answer takes messages up to the one for the last command; events are kept.
func (b *Tab) answer() message {
	b.T.Helper()
	for {
		text, err := b.out.ReadBytes(0)
		if err != nil {
			b.T.Fatalf("the browser went away: %v", err)
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

// Window sets the size and what the system prefers.
func (b *Tab) Window(width int, theme string) {
	b.T.Helper()
	b.Do(nil, "Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700})
	b.Do(nil, "Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{
		{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": "reduce"},
	}})
}

// Open goes to an address and waits until it is loaded.
func (b *Tab) Open(url string) {
	b.T.Helper()
	// The page that is left may be of the same address.
	Eval[bool](b, "window.left = true")
	b.Do(nil, "Page.navigate", map[string]any{"url": url})
	b.Until(`!window.left && document.readyState === "complete"`)
}

// Until waits for something to hold on the page.
func (b *Tab) Until(expression string) {
	b.T.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if Eval[bool](b, "!!("+expression+")") {
			return
		}
	}
	b.T.Fatalf("this did not come true: %s; the page has %.500q and said %q", expression, Eval[string](b, "document.body.innerText"), b.Complaints())
}

// Eval evaluates an expression on the page.
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

// Press types keys: characters, or those with names.
func (b *Tab) Press(keys ...string) {
	b.T.Helper()
	for _, key := range keys {
		for _, kind := range []string{"keyDown", "keyUp"} {
			event := map[string]any{"type": kind, "key": key, "windowsVirtualKeyCode": codes[key]}
			if key == "Enter" {
				event["text"] = "\r" // a key acts by its character
			} else if codes[key] == 0 {
				event["text"] = key
			}
			b.Do(nil, "Input.dispatchKeyEvent", event)
		}
	}
}

// Picture writes what is seen, the whole page, into a folder.
func (b *Tab) Picture(folder, name string) {
	b.T.Helper()
	// What is drawn when it comes near must have come near.
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

// Forget forgets what pages have done so far.
func (b *Tab) Forget() { b.events = nil }

// Complaints are what pages did wrong: console messages, exceptions, and requests beyond
// those that are allowed.
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
				out = append(out, "a request: "+p.Request.URL)
			}
		}
	}
	return out
}

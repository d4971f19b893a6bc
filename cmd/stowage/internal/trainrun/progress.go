// This file owns what is shown while a run goes on: a line that is written over on a
// terminal, and plain lines, not too many, everywhere else.

package trainrun

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/train"
)

// every is how often a plain line is written.
const every = time.Second

// Progress shows how a run goes.
type Progress struct {
	w    io.Writer
	live bool

	mu    sync.Mutex // ranks warn
	open  bool       // a line that the next one writes over
	last  time.Time
	shown map[string]bool // labels
	seen  map[string]bool // warnings
}

// NewProgress writes to w, which is a terminal if live is set.
func NewProgress(w io.Writer, live bool) *Progress {
	return &Progress{w: w, live: live, shown: map[string]bool{}, seen: map[string]bool{}}
}

// step shows a step: of so many, under a label, with the loss of an evaluation if there
// was one. The first under a label, those with an evaluation and the last are always
// shown.
func (p *Progress) step(label string, m train.Metrics, of int, eval *float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.live && p.shown[label] && m.Step+1 < of && eval == nil && time.Since(p.last) < every {
		return
	}
	p.shown[label], p.last = true, time.Now()
	speed := float64(m.Tokens) / m.Seconds
	text := fmt.Sprintf("%-18s step %*d/%d  loss %.4f  %6.0f tokens/s  device %9s  host %9s", label, len(fmt.Sprint(of)), m.Step+1, of, m.Loss, speed,
		page.Size(m.Device), page.Size(m.Host))
	if eval != nil {
		text += fmt.Sprintf("  held out %.4f", *eval)
	}
	if m.Reruns > 0 {
		text += fmt.Sprintf("  reruns %d", m.Reruns)
	}
	if p.live {
		fmt.Fprintf(p.w, "\r\x1b[2K%s", text)
		if p.open = true; eval != nil {
			p.settle()
		}
		return
	}
	fmt.Fprintln(p.w, text)
}

// Say writes a line that stays.
func (p *Progress) Say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settle()
	fmt.Fprintf(p.w, format+"\n", args...)
}

// Settle lets the line stay that the next one would write over.
func (p *Progress) Settle() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settle()
}

func (p *Progress) settle() {
	if p.open {
		fmt.Fprintln(p.w)
	}
	p.open = false
}

// Log is for warnings: each is shown once, whichever ranks have it and of what.
func (p *Progress) Log() *slog.Logger { return slog.New(&warnings{p: p}) }

// warnings is a log of sentences.
type warnings struct {
	p     *Progress
	attrs string
}

func (h *warnings) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }
func (h *warnings) WithGroup(string) slog.Handler                { return h }

func (h *warnings) WithAttrs(as []slog.Attr) slog.Handler {
	next := &warnings{h.p, h.attrs}
	for _, a := range as {
		next.attrs += ", " + a.String()
	}
	return next
}

func (h *warnings) Handle(_ context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "stash: ") {
		return nil // pools that grow are how they find their size; reruns are counted in the lines
	}
	message := plain(r.Message)
	what, _, _ := strings.Cut(message, ": ")
	h.p.mu.Lock()
	first := !h.p.seen[what]
	h.p.seen[what] = true
	h.p.mu.Unlock()
	if !first {
		return nil
	}
	text := message + h.attrs
	r.Attrs(func(a slog.Attr) bool {
		text += ", " + a.String()
		return true
	})
	h.p.Say("warning: %s", strings.ReplaceAll(text, "\n", "; "))
	return nil
}

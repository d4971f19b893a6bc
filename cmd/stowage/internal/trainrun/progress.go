// This file owns what is shown while a run goes on: plain lines, not too many, where
// nobody watches, and what is told to those who do: a screen, a server.

package trainrun

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/cmd/stowage/internal/live"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/report"
	"github.com/stowage-dev/stowage/train"
)

// every is how often a plain line is written.
const every = time.Second

// Progress shows how a run goes.
type Progress struct {
	w      io.Writer
	screen *live.Screen // nil: plain lines
	server *live.Server // or nil

	mu     sync.Mutex // ranks warn
	last   time.Time
	labels []string          // in the order of their first steps
	lines  map[string]string // the last of each label, where a screen shows no lines
	shown  map[string]bool   // labels
	seen   map[string]bool   // warnings
}

// NewProgress writes lines to w, unless a screen shows more. Screen and server may be
// nil.
func NewProgress(w io.Writer, screen *live.Screen, server *live.Server) *Progress {
	return &Progress{w: w, screen: screen, server: server, lines: map[string]string{}, shown: map[string]bool{}, seen: map[string]bool{}}
}

// watched is what is known of a run beforehand.
func (j *Job) watched(policies []string, from int) live.Run {
	return live.Run{Model: j.config.Model.Name, Layout: j.layout(), Policies: policies, Steps: j.Options.Steps, From: from}
}

// begin says what will be trained, and into which folder, if any.
func (p *Progress) begin(r live.Run, dir string) {
	if p.screen != nil {
		p.screen.Begin(r)
	}
	if p.server == nil {
		return
	}
	p.server.Begin(r)
	if dir != "" {
		p.server.From(func() (*report.Report, error) { return report.Read(dir) })
	}
}

// step shows a step: of so many, under a label, with the loss of an evaluation if there
// was one, and what its ranks hold, if anybody watches. Of plain lines the first under
// a label, those with an evaluation and the last are always shown.
func (p *Progress) step(label string, m train.Metrics, of int, eval *float64, ranks []live.Rank) {
	s := live.Step{Policy: label, Number: m.Step + 1, Loss: m.Loss, Held: eval, Tokens: m.Tokens, Seconds: m.Seconds, Reruns: m.Reruns, Ranks: ranks}
	if p.server != nil {
		p.server.Step(s)
	}
	if p.screen != nil {
		p.screen.Step(s)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.screen == nil && p.shown[label] && m.Step+1 < of && eval == nil && time.Since(p.last) < every {
		return
	}
	if !p.shown[label] {
		p.labels = append(p.labels, label)
	}
	p.shown[label], p.last = true, time.Now()
	text := fmt.Sprintf("%-18s step %*d/%d  loss %.4f  %6.0f tokens/s  device %9s  host %9s", label, len(fmt.Sprint(of)), m.Step+1, of, m.Loss, s.Speed(),
		page.Size(m.Device), page.Size(m.Host))
	if eval != nil {
		text += fmt.Sprintf("  held out %.4f", *eval)
	}
	if m.Reruns > 0 {
		text += fmt.Sprintf("  reruns %d", m.Reruns)
	}
	switch {
	case p.screen == nil:
		fmt.Fprintln(p.w, text)
	case eval != nil:
		p.screen.Say(text + "\n")
		delete(p.lines, label)
	default:
		p.lines[label] = text
	}
}

// Say writes a line that stays.
func (p *Progress) Say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.say(fmt.Sprintf(format+"\n", args...))
}

func (p *Progress) say(text string) {
	if p.screen != nil {
		p.screen.Say(text)
		return
	}
	io.WriteString(p.w, text)
}

// Settle ends what a screen shows; the last line of each label stays.
func (p *Progress) Settle() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.screen == nil {
		return
	}
	p.screen.Close()
	for _, label := range p.labels {
		if text := p.lines[label]; text != "" {
			p.screen.Say(text + "\n")
		}
	}
	clear(p.lines)
}

// ranks are what those of a trainer hold and did, if anybody watches.
func (p *Progress) ranks(t *train.Trainer, budget device.Bytes) (out []live.Rank) {
	if p.screen == nil && p.server == nil {
		return nil
	}
	did := t.Summaries()
	for i, u := range t.Usage() {
		r := live.Rank{
			Device: tier(u.Kind[device.Accel]), Host: tier(u.Kind[device.Host]), Out: did[i].Counts.OutBytes, In: did[i].Counts.InBytes,
			Evicted: did[i].Counts.Evicted, Late: did[i].Counts.Late,
		}
		r.Device.Budget = int64(budget)
		if s := did[i].Stash; s != nil {
			r.Spilled = int64(s.Spilled)
		}
		out = append(out, r)
	}
	return out
}

func tier(u device.KindUsage) live.Memory {
	return live.Memory{InUse: int64(u.Current), Peak: int64(u.Peak), Capacity: int64(u.Capacity)}
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

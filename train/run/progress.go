// This file owns what is shown during a run: a screen and a server for viewers, or else
// a plain line about once a second.

package run

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/eta"
	"github.com/stowage-dev/stowage/internal/plaintext"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/live"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/train"
)

// lineInterval is the time between plain lines.
const lineInterval = time.Second

// Progress shows a run in progress. Its methods can be called from several goroutines.
type Progress struct {
	w      io.Writer
	screen *live.Screen // nil: plain lines
	server *live.Server // or nil

	mu     sync.Mutex // ranks warn at the same time
	pace   *eta.Pace  // nil before the run begins
	last   time.Time
	labels []string          // in the order of their first steps
	lines  map[string]string // the last line of each label, while a screen is shown
	shown  map[string]bool   // labels that had a line
	seen   map[string]bool   // warnings
}

// NewProgress returns a Progress that writes lines to w, or shows a screen if it is not
// nil. It also reports to server if that is not nil.
func NewProgress(w io.Writer, screen *live.Screen, server *live.Server) *Progress {
	return &Progress{w: w, screen: screen, server: server, lines: map[string]string{}, shown: map[string]bool{}, seen: map[string]bool{}}
}

// description returns what viewers see of a run before its first step.
func (j *Job) description(policies []string, from int) live.Run {
	return live.Run{Model: j.config.Model.Name, Layout: j.layout(), Policies: policies, Steps: j.Options.Steps, From: from}
}

// begin announces a run. dir is its folder, or "".
func (p *Progress) begin(r live.Run, dir string) {
	p.mu.Lock()
	p.pace = eta.NewPace(r.Policies, r.Steps, r.From)
	p.mu.Unlock()
	if p.screen != nil {
		p.screen.Begin(r)
	}
	if p.server == nil {
		return
	}
	p.server.Begin(r)
	p.show(dir)
}

// show makes viewers see the run in a folder, unless dir is "".
func (p *Progress) show(dir string) {
	if p.server != nil && dir != "" {
		p.server.SetSource(func() (*report.Report, error) { return report.ReadRecent(traceBytes, dir) })
	}
}

// step shows a step under a label. of is the number of steps, eval the loss of an
// evaluation or nil, and ranks what the ranks hold. Of plain lines it always shows the
// first and the last under a label, and those with an evaluation.
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
	p.pace.Step(label, m.Step+1, time.Now())
	if p.screen == nil && p.shown[label] && m.Step+1 < of && eval == nil && time.Since(p.last) < lineInterval {
		return
	}
	if !p.shown[label] {
		p.labels = append(p.labels, label)
	}
	p.shown[label], p.last = true, time.Now()
	text := fmt.Sprintf("%-18s step %*d/%d  loss %.4f  %6.0f tokens/s  device %9s  host %9s", label, len(fmt.Sprint(of)), m.Step+1, of, m.Loss, s.Speed(),
		memory.Bytes(m.Device).Short(), memory.Bytes(m.Host).Short())
	if eval != nil {
		text += fmt.Sprintf("  held out %.4f", *eval)
	}
	if m.Reruns > 0 {
		text += fmt.Sprintf("  reruns %d", m.Reruns)
	}
	switch {
	case p.screen == nil:
		if done, all := p.pace.Progress(); done < all {
			if left, known := p.pace.Left(p.last); known && left >= lineInterval {
				text += "  " + eta.Clock(left) + " left"
			}
		}
		fmt.Fprintln(p.w, text)
	case eval != nil:
		p.screen.Say(text + "\n")
		delete(p.lines, label)
	default:
		p.lines[label] = text
	}
}

// Say writes a line, which stays on a screen.
func (p *Progress) Say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.say(fmt.Sprintf(format+"\n", args...))
}

func (p *Progress) say(text string) {
	text = plaintext.String(text) // it may have names from files
	if p.screen != nil {
		p.screen.Say(text)
		return
	}
	io.WriteString(p.w, text)
}

// settle closes the screen. The last line of each label stays.
func (p *Progress) settle() {
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

// ranks returns what the ranks of a trainer hold and did, or nil without viewers. Peaks
// are at least those before.
func (p *Progress) ranks(t *train.Trainer, budget memory.Bytes, before []peak) (out []live.Rank) {
	if p.screen == nil && p.server == nil {
		return nil
	}
	did, peaks := t.Summaries(), peaksOf(t, before)
	for i, u := range t.Usage() {
		out = append(out, rankOf(u, did[i], peaks[i], budget))
	}
	return out
}

// rankOf returns what one rank holds and did.
func rankOf(u device.Usage, did memory.Summary, most peak, budget memory.Bytes) live.Rank {
	c := did.Counts
	r := live.Rank{
		Device: tier(u.Kind[memory.Device]), Host: tier(u.Kind[memory.Host]), Out: int64(c.OutBytes), In: int64(c.InBytes), Evicted: c.Evicted, Late: c.Late,
	}
	r.Device.Budget = int64(budget)
	r.Device.Peak, r.Host.Peak = most.Device, most.Host
	if did.Stash != nil {
		r.Spilled = did.Stash.Spilled
	}
	return r
}

func tier(u device.KindUsage) live.Memory {
	return live.Memory{InUse: int64(u.Current), Peak: int64(u.Peak), Capacity: int64(u.Capacity)}
}

// Log returns a logger that shows each warning once, even if several ranks log it.
func (p *Progress) Log() *slog.Logger { return slog.New(&warnings{p: p}) }

// warnings handles a log by printing sentences.
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
	what, _, _ := strings.Cut(r.Message, ": ")
	h.p.mu.Lock()
	first := !h.p.seen[what]
	h.p.seen[what] = true
	h.p.mu.Unlock()
	if !first {
		return nil
	}
	text := r.Message + h.attrs
	r.Attrs(func(a slog.Attr) bool {
		text += ", " + a.String()
		return true
	})
	h.p.Say("warning: %s", strings.ReplaceAll(text, "\n", "; "))
	return nil
}

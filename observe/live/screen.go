// This file owns the terminal. The picture is a few lines below the printed text. It is
// redrawn in place while the run goes on, and wiped at the end.
//
// Nothing is read from the terminal, so its mode never changes; the cursor stays
// visible, and no second screen is opened. An interrupt, a panic or a kill therefore
// leaves the terminal usable: after each frame the cursor is at the beginning of an
// empty line below the picture, and all colours have ended.

package live

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/stowage-dev/stowage/internal/plaintext"
	"github.com/stowage-dev/stowage/internal/sysinfo"
)

// refresh is the time between frames, short enough for a clock in seconds.
const refresh = 200 * time.Millisecond

// Screen draws the progress of a run on a terminal:
//
//  1. NewScreen returns a screen that draws nothing yet.
//  2. Begin starts to draw.
//  3. Step notes a step; call it after each one.
//  4. Close wipes the picture. Say still prints.
type Screen struct {
	w       io.Writer
	size    func() (width, height int, shown bool) // not shown if the program is in the background
	letters letters
	plain   bool // whether all text is ASCII
	colour  bool

	mu   sync.Mutex // guards view; never held while writing, so that no run waits for a terminal
	view *view

	drawing sync.Mutex // guards the terminal; taken before mu
	widths  []int      // of the lines of the picture

	news          chan struct{} // a step was added
	stop, stopped chan struct{}
}

// NewScreen returns a screen for the terminal f, or nil if f is not a terminal or cannot
// move its cursor. Env returns environment variables, as os.Getenv does: TERM, NO_COLOR
// and the locale decide the look.
func NewScreen(f *os.File, env func(string) string) *Screen {
	if _, _, ok := sysinfo.Terminal(f); !ok || env("TERM") == "dumb" || env("TERM") == "" {
		return nil
	}
	return newScreen(f, func() (int, int, bool) {
		width, height, ok := sysinfo.Terminal(f)
		return width, height, ok && sysinfo.Foreground(f)
	}, env)
}

func newScreen(w io.Writer, size func() (int, int, bool), env func(string) string) *Screen {
	s := &Screen{w: w, size: size, letters: ascii, plain: plaintext.WantsASCII(env), colour: env("NO_COLOR") == "", news: make(chan struct{}, 1)}
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} { // the first that is set counts
		if v := strings.ToUpper(env(name)); v != "" {
			if strings.Contains(v, "UTF-8") || strings.Contains(v, "UTF8") {
				s.letters = blocks
			}
			break
		}
	}
	return s
}

// Begin starts to draw the progress of r.
func (s *Screen) Begin(r Run) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.view = newView(r, time.Now())
	s.stop, s.stopped = make(chan struct{}), make(chan struct{})
	go s.draw(s.stop, s.stopped)
}

// Step adds a step, which the next frame shows.
func (s *Screen) Step(step Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.view.add(step, time.Now())
	select {
	case s.news <- struct{}{}:
	default:
	}
}

// Say prints text above the picture, where it stays. The text should end with a newline.
func (s *Screen) Say(text string) {
	s.drawing.Lock()
	defer s.drawing.Unlock()
	var b strings.Builder
	s.wipe(&b)
	if s.plain {
		text = plaintext.ASCII(text)
	}
	if width, _, _ := s.size(); width > 0 {
		text = fitLine(text, width)
	}
	b.WriteString(text)
	s.write(&b)
}

// fitLine breaks a line that is wider than the terminal at words. Blanks that align it with
// others go first.
func fitLine(text string, width int) string {
	line, ended := strings.CutSuffix(text, "\n")
	if !ended || strings.Contains(line, "\n") || utf8.RuneCountInString(line) <= width {
		return text
	}
	return plaintext.Fit(strings.Join(strings.Fields(line), " ")+"\n", width)
}

// Close stops drawing and wipes the picture. It does nothing if Begin was not called.
func (s *Screen) Close() {
	s.mu.Lock()
	stop, stopped := s.stop, s.stopped
	s.stop = nil
	s.mu.Unlock()
	if stop == nil {
		return // not begun, or closed already
	}
	close(stop)
	<-stopped
	s.Say("")
}

// draw paints a frame after each step and at every tick, until stop is closed.
func (s *Screen) draw(stop, stopped chan struct{}) {
	defer close(stopped)
	tick := time.NewTicker(refresh)
	defer tick.Stop()
	resumed, cancel := continued()
	defer cancel()
	var last time.Time
	for {
		if time.Since(last) >= refresh/2 {
			s.paint()
			last = time.Now()
		}
		select {
		case <-tick.C:
		case <-s.news:
		case <-resumed:
			s.drawing.Lock()
			s.widths = nil // the shell has printed below the old picture, so leave that alone
			s.drawing.Unlock()
		case <-stop:
			return
		}
	}
}

// paint draws a frame in one write.
func (s *Screen) paint() {
	s.drawing.Lock()
	defer s.drawing.Unlock()
	width, height, shown := s.room()
	if !shown {
		return
	}
	s.mu.Lock()
	lines := s.view.frame(width-1, height-1, s.letters, time.Now()) // some terminals wrap in the last column
	s.mu.Unlock()
	var b strings.Builder
	b.WriteString("\x1b[?2026h") // asks the terminal to show the frame at once
	s.home(&b, width, height)
	for _, l := range lines {
		l.write(&b, s.colour)
		b.WriteString("\x1b[K\n")
	}
	b.WriteString("\x1b[J\x1b[?2026l")
	s.write(&b)
	s.widths = nil
	for _, l := range lines {
		s.widths = append(s.widths, l.width())
	}
}

// room returns the size of the terminal, or 80 x 24 if it does not know it.
func (s *Screen) room() (width, height int, shown bool) {
	width, height, shown = s.size()
	if width < 1 || height < 1 {
		width, height = 80, 24
	}
	return width, height, shown
}

// home moves the cursor to the beginning of the picture. If the terminal has become
// narrower, each line is wrapped into as many rows as it needs now.
func (s *Screen) home(b *strings.Builder, width, height int) {
	rows := 0
	for _, w := range s.widths {
		rows += max(1, (w+width-1)/width)
	}
	b.WriteByte('\r')
	if rows = min(rows, height-1); rows > 0 {
		fmt.Fprintf(b, "\x1b[%dA", rows)
	}
}

// wipe removes the picture.
func (s *Screen) wipe(b *strings.Builder) {
	if len(s.widths) == 0 {
		return
	}
	width, height, _ := s.room()
	s.home(b, width, height)
	b.WriteString("\x1b[J")
	s.widths = nil
}

func (s *Screen) write(b *strings.Builder) {
	_, _ = io.WriteString(s.w, b.String()) // a run does not fail because its terminal is gone
}

// This file owns the terminal. The picture is some lines at the end of what was printed,
// written over while the run goes on, and wiped at its end.
//
// No library draws it: nothing is read from the terminal, and so its mode is never
// changed, no cursor is hidden and no other screen opened. There is nothing that an
// interrupt, a panic or a kill could leave wrong: after every frame the cursor is at
// the beginning of an empty line below the picture, and all colours have ended.

package live

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// refresh is how often the picture is drawn: often enough for a clock in seconds.
const refresh = 200 * time.Millisecond

// Screen shows a run on a terminal. Its life: NewScreen, Begin, Step, Close; then Say
// still prints.
type Screen struct {
	w       io.Writer
	size    func() (width, height int, shown bool) // not shown: the program is in the background
	letters letters
	colour  bool

	mu   sync.Mutex // of the view: a run never waits for a terminal
	view *view

	drawing sync.Mutex // of the terminal; taken before mu
	widths  []int      // of the lines that are there

	news          chan struct{} // a step
	stop, stopped chan struct{}
}

// NewScreen is nil where f is no terminal, or one that cannot move its cursor.
func NewScreen(f *os.File, env func(string) string) *Screen {
	if _, _, ok := terminal(f); !ok || env("TERM") == "dumb" || env("TERM") == "" {
		return nil
	}
	return newScreen(f, func() (int, int, bool) {
		width, height, ok := terminal(f)
		return width, height, ok && foreground(f)
	}, env)
}

func newScreen(w io.Writer, size func() (int, int, bool), env func(string) string) *Screen {
	s := &Screen{w: w, size: size, letters: ascii, colour: env("NO_COLOR") == "", news: make(chan struct{}, 1)}
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

// Begin starts to draw.
func (s *Screen) Begin(r Run) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.view = newView(r, time.Now())
	s.stop, s.stopped = make(chan struct{}), make(chan struct{})
	go s.draw(s.stop, s.stopped)
}

// Step is seen with the next frame.
func (s *Screen) Step(step Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.view.add(step, time.Now())
	select {
	case s.news <- struct{}{}:
	default:
	}
}

// Say prints lines that stay, above the picture.
func (s *Screen) Say(text string) {
	s.drawing.Lock()
	defer s.drawing.Unlock()
	var b strings.Builder
	s.wipe(&b)
	b.WriteString(text)
	s.write(&b)
}

// Close wipes the picture.
func (s *Screen) Close() {
	s.mu.Lock()
	stop, stopped := s.stop, s.stopped
	s.stop = nil
	s.mu.Unlock()
	if stop == nil {
		return // nothing began, or it was closed before
	}
	close(stop)
	<-stopped
	s.Say("")
}

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
			s.widths = nil // a shell has printed below the picture, which stays
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
	width, height, shown := s.size()
	if !shown {
		return
	}
	if width < 1 || height < 1 {
		width, height = 80, 24 // a terminal that does not say
	}
	s.mu.Lock()
	lines := s.view.frame(width-1, height-1, s.letters, time.Now()) // in the last column some terminals wrap
	s.mu.Unlock()
	var b strings.Builder
	b.WriteString("\x1b[?2026h") // terminals that know it show the frame at once
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

// home moves to where the picture begins. If the terminal has become narrower its lines
// were wrapped, each into as many rows as it needs now.
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

// wipe takes the picture away.
func (s *Screen) wipe(b *strings.Builder) {
	if len(s.widths) == 0 {
		return
	}
	width, height, _ := s.size()
	if width < 1 || height < 1 {
		width, height = 80, 24
	}
	s.home(b, width, height)
	b.WriteString("\x1b[J")
	s.widths = nil
}

func (s *Screen) write(b *strings.Builder) {
	_, _ = io.WriteString(s.w, b.String()) // a terminal that has gone is no error of the run's
}

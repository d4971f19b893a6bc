package live

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"
)

// emulator is a simple terminal. It knows the sequences that the screen writes and fails on
// all others. It keeps all rows from the first on.
type emulator struct {
	mu     sync.Mutex
	width  int
	rows   [][]rune
	x, y   int
	colour bool
	wrong  string
}

func (e *emulator) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	text := string(p)
	for text != "" {
		if rest, ok := strings.CutPrefix(text, "\x1b["); ok {
			end := strings.IndexFunc(rest, func(r rune) bool { return r >= '@' && r <= '~' })
			e.control(rest[:end], rest[end])
			text = rest[end+1:]
			continue
		}
		r, n := utf8.DecodeRuneInString(text)
		e.letter(r)
		text = text[n:]
	}
	return len(p), nil
}

func (e *emulator) row() *[]rune {
	for len(e.rows) <= e.y {
		e.rows = append(e.rows, nil)
	}
	return &e.rows[e.y]
}

func (e *emulator) letter(r rune) {
	switch {
	case r == '\r':
		e.x = 0
	case r == '\n': // the terminal's driver puts a return before it
		e.x, e.y = 0, e.y+1
	case r < ' ':
		e.wrong = fmt.Sprintf("control character %q", r)
	default:
		if e.x >= e.width {
			e.x, e.y = 0, e.y+1
		}
		row := e.row()
		for len(*row) <= e.x {
			*row = append(*row, ' ')
		}
		(*row)[e.x] = r
		e.x++
	}
}

func (e *emulator) control(args string, verb byte) {
	switch n, _ := strconv.Atoi(args); {
	case verb == 'A' && n > 0:
		if e.y -= n; e.y < 0 {
			e.wrong, e.y = "moved above the first row", 0
		}
	case verb == 'K' && args == "":
		row := e.row()
		*row = (*row)[:min(e.x, len(*row))]
	case verb == 'J' && args == "":
		row := e.row()
		*row = (*row)[:min(e.x, len(*row))]
		e.rows = e.rows[:e.y+1]
	case verb == 'm':
		e.colour = args != "0"
	case (verb == 'h' || verb == 'l') && args == "?2026":
	default:
		e.wrong = fmt.Sprintf("unknown control %q%c", args, verb)
	}
}

// resize wraps rows again, as terminals do. No line here is longer than one row.
func (e *emulator) resize(width int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var rows [][]rune
	y := 0
	for i, r := range e.rows { // the cursor's is the last, and empty
		if i == e.y {
			y = len(rows)
		}
		for len(r) > width {
			rows = append(rows, r[:width:width])
			r = r[width:]
		}
		rows = append(rows, r)
	}
	e.y = y
	e.rows, e.width = rows, width
}

func (e *emulator) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var lines []string
	for _, r := range e.rows {
		lines = append(lines, strings.TrimRight(string(r), " "))
	}
	return strings.TrimRight(strings.Join(lines, "\n"), "\n")
}

func environment(pairs ...string) func(string) string {
	return func(name string) string {
		for _, p := range pairs {
			if k, v, _ := strings.Cut(p, "="); k == name {
				return v
			}
		}
		return ""
	}
}

// A terminal that does not know its width or its height counts as one of 80 x 24.
func TestScreenWithoutSize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		drawn := func(width, height int) string {
			var b strings.Builder
			s := newScreen(&b, func() (int, int, bool) { return width, height, true }, environment("LANG=C.UTF-8"))
			s.view = newView(Run{Model: "tiny", Layout: "one rank", Policies: []string{"none", "stash"}, Steps: 100}, start)
			for range 2 {
				s.paint()
			}
			s.Say("line\n")
			return b.String()
		}
		want := drawn(80, 24)
		for _, size := range [][2]int{{0, 0}, {0, 50}, {50, 0}} {
			if got := drawn(size[0], size[1]); got != want {
				t.Errorf("%v: %q, want %q", size, got, want)
			}
		}
		if drawn(40, 24) == want || drawn(80, 3) == want {
			t.Error("the size makes no difference")
		}
	})
}

// For any order of steps, texts and resizes, all texts remain in order and no picture does.
// The cursor is below them, at the beginning of a line, without colour.
func TestScreenLeavesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := &emulator{width: 80}
		height := 60
		s := newScreen(e, func() (int, int, bool) { return e.width, height, true }, environment("LANG=C.UTF-8"))
		s.view = newView(Run{Model: "tiny", Layout: "one rank", Policies: []string{"none", "stash"}, Steps: 100}, start)
		var said []string
		for i := range rapid.IntRange(1, 30).Draw(t, "events") {
			switch rapid.IntRange(0, 3).Draw(t, "event") {
			case 0:
				s.Step(sample(rapid.SampledFrom([]string{"none", "stash"}).Draw(t, "policy"), i+1))
			case 1:
				said = append(said, fmt.Sprint("line ", i))
				s.Say(said[len(said)-1] + "\n")
			case 2:
				if to := rapid.IntRange(30, 120).Draw(t, "width"); to < e.width || len(s.widths) == 0 {
					e.resize(to)
				}
				height = rapid.IntRange(60, 90).Draw(t, "height") // what has left a window at its top cannot be wiped
			}
			s.paint()
			picture := strings.TrimPrefix(e.String(), strings.Join(said, "\n"))
			if !strings.HasPrefix(e.String(), strings.Join(said, "\n")) || strings.Count(picture, "tiny on") != 1 {
				t.Fatalf("said %q, shown\n%s", said, e)
			}
		}
		s.Say("")
		if got := e.String(); got != strings.Join(said, "\n") || e.x != 0 || e.y != len(said) || e.colour || e.wrong != "" {
			t.Fatalf("left %q of %q, at %d, %d, %s", got, said, e.x, e.y, e.wrong)
		}
	})
}

// Lines that stay fit the terminal.
func TestScreenFitsLines(t *testing.T) {
	const short, long = "a  line\n", "stash   step 20/20  loss 4.2393  12345 tokens/s   µ\n"
	for width, want := range map[int]string{0: long, 51: long, 50: "stash step 20/20 loss 4.2393 12345 tokens/s µ\n", 40: "stash step 20/20 loss 4.2393 12345\n  tokens/s µ\n"} {
		var b strings.Builder
		s := newScreen(&b, func() (int, int, bool) { return width, 20, true }, environment("LC_ALL=C.UTF-8"))
		s.Say(short)
		s.Say(long)
		if got := b.String(); got != short+want {
			t.Errorf("%d columns: %q, want %q", width, got, short+want)
		}
	}
}

// The picture appears without a step and disappears with Close, which may be called twice or
// without Begin. A program in the background draws nothing.
func TestScreenDraws(t *testing.T) {
	e := &emulator{width: 80}
	shown := true
	var mu sync.Mutex
	s := newScreen(e, func() (int, int, bool) { mu.Lock(); defer mu.Unlock(); return 0, 0, shown }, environment("LC_ALL=C", "LANG=C.UTF-8", "NO_COLOR=1"))
	s.Close()
	s.Begin(Run{Model: "tiny", Layout: "one rank", Policies: []string{"none"}, Steps: 100})
	s.Step(sample("none", 1))
	for !strings.Contains(e.String(), "rank 3") {
		time.Sleep(refresh / 4)
	}
	if strings.ContainsAny(e.String(), "█▒") {
		t.Errorf("the language is C, and shown is\n%s", e)
	}
	mu.Lock()
	shown = false
	mu.Unlock()
	s.Say("in the background\n")
	time.Sleep(2 * refresh)
	if got := e.String(); got != "in the background" {
		t.Errorf("in the background, shown is %q", got)
	}
	s.Close()
	s.Close()
	if e.wrong != "" {
		t.Error(e.wrong)
	}
}
